"""Checkpoints of a run: written while the next step runs, deleted by rule, repeated where missing.

A step is committed before its checkpoint is complete. If a kill comes between, the next process
restores an earlier checkpoint and repeats the updates since then from the stored rollouts: nothing
is sampled again, and on a CPU the weights are the same bit for bit.
"""

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from types import TracebackType

from anyio import CancelScope, to_thread

from whet.config import RunConfig
from whet.errors import StoreError, TrainerError, boundary
from whet.protocols import Algorithm, Collector, StepLog, TrainingBackend
from whet.training.step import Plan, Stopwatch, Update, collect_step, update_policy
from whet.training.stopping import best_step
from whet.types import StepRecord

BUSY_AFTER_S = 0.25
"""Seconds to wait for the checkpoint before, rather than to leave one out."""


class Checkpoints:
    """Writer of a run's checkpoints, one at a time, in a thread. A context: leaving it waits."""

    def __init__(self, folder: Path, trainer: TrainingBackend, config: RunConfig) -> None:
        self.folder = folder
        self._trainer = trainer
        self._config = config.checkpoints
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._newest = ""
        """Name of the checkpoint that was written last, or is being written."""

    async def __aenter__(self) -> "Checkpoints":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with CancelScope(shield=True):
            await to_thread.run_sync(self._thread.shutdown)

    async def save(self, done: Sequence[StepRecord]) -> None:
        """Begin to write the checkpoint of the last step, which need not be committed, if due.

        It is left out while another is still being written, unless it is the best: large weights
        take longer to write than a step takes.

        Raises:
            TrainerError: the checkpoint before could not be written.
        """
        step = done[-1]
        if step is not best_step(done) and (
            (step.step + 1) % self._config.every or await self._is_busy()
        ):
            return
        await self._begin(step)
        self._delete_others(done[:-1])

    async def finish(self, done: Sequence[StepRecord]) -> None:
        """Write the checkpoint of the last step, all of which are committed, unless it exists."""
        if not done:
            return
        exists = (self.folder / done[-1].checkpoint).is_dir()
        if self._newest != done[-1].checkpoint and not exists:
            await self._begin(done[-1])
        await self._wait()
        self._delete_others(done)

    async def _begin(self, step: StepRecord) -> None:
        await self._wait()
        write = await self._trainer.snapshot()
        self._newest = step.checkpoint
        self._writing = self._thread.submit(self._write, write, self.folder / step.checkpoint)

    def _write(self, write: Callable[[Path], None], folder: Path) -> None:
        with boundary(TrainerError, f"cannot write the checkpoint {str(folder)!r}"):
            write(folder)

    async def _is_busy(self) -> bool:
        """Whether the checkpoint before is still being written, after a moment of patience."""
        if self._writing is not None:
            await to_thread.run_sync(partial(wait, [self._writing], BUSY_AFTER_S))
        return self._writing is not None and not self._writing.done()

    async def _wait(self) -> None:
        if self._writing is not None:
            await to_thread.run_sync(self._writing.result)

    def _delete_others(self, committed: Sequence[StepRecord]) -> None:
        """Delete all but the newest complete checkpoints of committed steps and the best one."""
        complete = [r for r in committed if (self.folder / r.checkpoint).is_dir()]
        kept = {record.checkpoint for record in complete[-self._config.keep :]}
        if best := best_step(committed):
            kept.add(best.checkpoint)
        for folder in self.folder.glob("*"):
            if folder.name not in kept and self._newest not in folder.name:
                shutil.rmtree(folder, ignore_errors=True)


async def restore_steps(
    plan: Plan,
    config: RunConfig,
    *,
    checkpoints: Path,
    collector: Collector,
    algorithm: Algorithm,
    trainer: TrainingBackend,
    log: StepLog,
    update: Update | None = None,
) -> int:
    """Restore the weights after the last step; returns the number of updates that were repeated.

    They are those since the newest checkpoint, and are computed from the stored rollouts.

    Raises:
        StoreError: the rollouts of such an update are no longer in the store.
    """
    done = await log.steps()
    complete = [r.step + 1 for r in done if (checkpoints / r.checkpoint).is_dir()]
    first = max(complete, default=0)
    if first:
        await trainer.restore(checkpoints / done[first - 1].checkpoint)
    for record in done[first:]:
        before = done[: record.step]
        batch = await collect_step(
            plan, before, config, Stopwatch(), collector=collector, algorithm=algorithm
        )
        metrics = await (update or update_policy)(batch, before, config, Stopwatch(), trainer)
        same = tuple(rollout.id for rollout in batch.rollouts) == record.consumed
        if not same or metrics["calls"] != record.metrics["calls"]:
            raise StoreError(
                f"step {record.step + 1} has no checkpoint, and its update cannot be repeated: the "
                "calls of its rollouts are no longer in the store, or the algorithm gives "
                "other credit now; start a new run from the model or a checkpoint of this one"
            )
    return len(done) - first
