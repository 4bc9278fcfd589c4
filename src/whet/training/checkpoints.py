"""Checkpoints of a run: written while the next step runs, deleted by rule, repeated where missing.

A step is committed before its checkpoint is complete. If a kill comes between, the next process
restores an earlier checkpoint and repeats the updates since then from the stored rollouts: nothing
is sampled again, and on a CPU the weights are the same bit for bit.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

from anyio import CancelScope, to_thread

from whet.config import RunConfig
from whet.errors import StoreError, TrainerError, boundary
from whet.protocols import Algorithm, Collector, StepLog, TrainingBackend
from whet.training.step import (
    Plan,
    Stopwatch,
    Update,
    collect_step,
    find_first_group,
    update_policy,
)
from whet.training.stopping import find_best_step
from whet.types import Rollout, StepRecord

QUICK_S = 0.25
"""Checkpoints that are written within this many seconds are never left out."""
MAX_SHARE = 0.2
"""Share of the time in which others may be written: the store needs the disk as well."""


class Checkpoints:
    """Writer of a run's checkpoints, one at a time, in a thread. A context: leaving it waits."""

    def __init__(
        self,
        folder: Path,
        trainer: TrainingBackend,
        config: RunConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self._clock = clock
        self._trainer = trainer
        self._config = config.checkpoints
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[float] | None = None
        """Returns the seconds it took."""
        self._began = 0.0
        self._newest = ""
        """Name of the checkpoint that was written last, or is being written."""

    async def __aenter__(self) -> "Checkpoints":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        with CancelScope(shield=True):
            await to_thread.run_sync(self._thread.shutdown)

    async def save(self, done: Sequence[StepRecord]) -> None:
        """Begin to write the checkpoint of the last step, which need not be committed, if due.

        It is left out while another is still being written, or was written not long ago, unless it
        is the best: large weights take longer to write than a step takes.

        Raises:
            TrainerError: the checkpoint before could not be written.
        """
        step = done[-1]
        if step is not find_best_step(done) and (
            (step.step + 1) % self._config.every or await self._is_too_early()
        ):
            return
        await self._begin(step, delete_others_of=done[:-1])

    async def finish(self, done: Sequence[StepRecord]) -> None:
        """Write the checkpoint of the last step, all of which are committed, unless it exists."""
        if not done:
            return
        exists = (self.folder / done[-1].checkpoint).is_dir()
        if self._newest != done[-1].checkpoint and not exists:
            await self._begin(done[-1], delete_others_of=done[:-1])
        await self.wait()
        await to_thread.run_sync(self._delete_others, done)

    async def _begin(self, step: StepRecord, *, delete_others_of: Sequence[StepRecord]) -> None:
        await self.wait()
        write = await self._trainer.snapshot()
        self._newest, self._began = step.checkpoint, self._clock()
        folder, committed = self.folder / step.checkpoint, list(delete_others_of)
        self._writing = self._thread.submit(self._write, write, folder, committed)

    def _write(
        self, write: Callable[[Path], None], folder: Path, committed: Sequence[StepRecord]
    ) -> float:
        """Write a checkpoint, in the thread; returns the seconds it took."""
        began = self._clock()
        self._delete_others(committed)
        with boundary(TrainerError, f"cannot write the checkpoint {str(folder)!r}"):
            write(folder)
        return self._clock() - began

    async def _is_too_early(self) -> bool:
        """Whether the checkpoint before is being written, or writing one would take too much time.

        A quick one is waited for.
        """
        if self._writing is None:
            return False
        quick = QUICK_S - (self._clock() - self._began)
        if not self._writing.done() and quick > 0:
            await to_thread.run_sync(partial(wait, [self._writing], quick))
        if not self._writing.done():
            return True
        took = self._writing.result()
        return took > QUICK_S and self._clock() - self._began < took / MAX_SHARE

    async def wait(self) -> None:
        """Wait until no checkpoint is being written. Raises TrainerError if one cannot be."""
        if self._writing is not None:
            await to_thread.run_sync(self._writing.result)

    def _delete_others(self, committed: Sequence[StepRecord]) -> None:
        """Delete all but the newest complete checkpoints of committed steps and the best one."""
        complete = [r for r in committed if (self.folder / r.checkpoint).is_dir()]
        kept = {record.checkpoint for record in complete[-self._config.keep :]}
        if best := find_best_step(committed):
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

    They are those since the newest checkpoint, and are computed from the stored rollouts. If one of
    them is the best step, its checkpoint is written: no later step would.

    Raises:
        StoreError: the rollouts of such an update are no longer in the store.
    """
    done = await log.steps()
    complete = [r.step + 1 for r in done if (checkpoints / r.checkpoint).is_dir()]
    first, best = max(complete, default=0), find_best_step(done)
    if first:
        await trainer.restore(checkpoints / done[first - 1].checkpoint)
    for record in done[first:]:
        before = done[: record.step]
        stored = _limit_plan(plan, find_first_group([*before, record], config), record)
        batch = await collect_step(
            stored, before, config, Stopwatch(), collector=collector, algorithm=algorithm
        )
        metrics = await (update or update_policy)(batch, before, config, Stopwatch(), trainer)
        same = tuple(rollout.id for rollout in batch.rollouts) == record.consumed
        if not same or metrics["calls"] != record.metrics["calls"]:
            raise _build_changed_error(record)
        if record is best:
            await trainer.save(checkpoints / record.checkpoint)
    return len(done) - first


def _limit_plan(plan: Plan, groups: int, record: StepRecord) -> Plan:
    """Return a plan of the first groups, which have run; asking for another raises StoreError.

    Nothing runs rollouts yet: a step that wanted more than it consumed would wait for ever.
    """

    def plan_stored(group: int) -> Sequence[Rollout]:
        if group >= groups:
            raise _build_changed_error(record)
        return plan(group)

    return plan_stored


def _build_changed_error(record: StepRecord) -> StoreError:
    return StoreError(
        f"step {record.step + 1} has no checkpoint, and its update cannot be repeated: the "
        "calls of its rollouts are no longer in the store, or the algorithm gives "
        "other credit now; start a new run from the model or a checkpoint of this one"
    )
