"""The asynchronous training loop: rollouts of later steps run while a step is trained.

Steps consume the groups of the plan in order, as in the on-policy loop; they are only enqueued
earlier. Before step s the groups of steps s to s + `max_staleness` are enqueued, and no others, so
no trained token is more than `max_staleness` updates old. The bound limits what is enqueued:
nothing is discarded, and no group is preferred because it finished early.
"""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from anyio import create_task_group

from whet.config import RunConfig
from whet.io.threads import unwrap_group
from whet.protocols import Algorithm, Collector, StepLog, TrainingBackend
from whet.training.checkpoints import Checkpoints
from whet.training.step import (
    Evaluate,
    Plan,
    StepBatch,
    Stopwatch,
    Update,
    collect_step,
    evaluate_step,
    find_first_group,
    update_policy,
)
from whet.training.stopping import explain_stop
from whet.types import Rollout, StepRecord


async def train(
    plan: Plan,
    config: RunConfig,
    *,
    checkpoints: Path,
    collector: Collector,
    algorithm: Algorithm,
    trainer: TrainingBackend,
    log: StepLog,
    evaluate: Evaluate | None = None,
    update: Update | None = None,
) -> AsyncGenerator[StepRecord]:
    """Run the remaining steps in order; yield each once it is durable.

    A step happened if and only if the log has it, as in the on-policy loop. Rollouts enqueued
    ahead keep their ids, so a resumed run finds them in the store.
    """
    done = await log.steps()
    async with Checkpoints(checkpoints, trainer, config) as writer:
        while len(done) < config.steps and not explain_stop(done, config):
            step = len(done)
            timer = Stopwatch()
            ahead = _plan_window(plan, done, config)
            await collector.begin(ahead)
            batch = await collect_step(
                plan, done, config, timer, collector=collector, algorithm=algorithm
            )
            async with _measure_sampler_idle(collector, _list_not_in_batch(ahead, batch), timer):
                metrics = await (update or update_policy)(batch, done, config, timer, trainer)
                with timer.phase("publish"):
                    version = await trainer.publish()
            metrics |= await evaluate_step(step, config, timer, evaluate)
            record = StepRecord(
                step=step,
                version=version,
                checkpoint=f"step-{step:06d}",
                consumed=tuple(rollout.id for rollout in batch.rollouts),
                metrics=metrics,
            )
            with timer.phase("save"):
                await writer.save([*done, record])
            record = record.model_copy(update={"metrics": metrics | timer.read()})
            await log.commit(record, advantages=batch.advantages())
            done.append(record)
            yield record
        await writer.finish(done)


def _plan_window(plan: Plan, done: Sequence[StepRecord], config: RunConfig) -> list[Rollout]:
    """Return the rollouts to enqueue before the next step: its own and those of later steps.

    Every step consumes at least `tasks_per_step` groups, so a window of `max_staleness + 1` steps
    bounds the staleness. The window ends with the last step, so nothing is left over.
    """
    first = find_first_group(done, config)
    steps = min(config.loop.max_staleness + 1, config.steps - len(done))
    groups = range(first, first + steps * config.tasks_per_step)
    return [rollout for group in groups for rollout in plan(group)]


def _list_not_in_batch(ahead: Sequence[Rollout], batch: StepBatch) -> list[str]:
    taken = {rollout.id for rollout in batch.rollouts}
    return [rollout.id for rollout in ahead if rollout.id not in taken]


@asynccontextmanager
async def _measure_sampler_idle(
    collector: Collector, rollouts: Sequence[str], timer: Stopwatch
) -> AsyncGenerator[None]:
    """Record how long all of these rollouts had ended while the block ran: idle sampler time."""
    ended: list[float] = []

    async def wait() -> None:
        await collector.wait(rollouts)
        ended.append(time.monotonic())

    with unwrap_group():
        async with create_task_group() as tasks:
            tasks.start_soon(wait)
            yield
            tasks.cancel_scope.cancel()
    idle = time.monotonic() - ended[0] if ended else 0.0
    timer.seconds["sampler_wait_seconds"] = idle
