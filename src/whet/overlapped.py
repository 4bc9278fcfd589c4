"""The overlapped loop: rollouts of later steps run while a step is trained.

Steps take the groups of the plan in their order, as the on-policy loop does; only they are begun
earlier. Before a step the groups of it and of the next `max_staleness` steps are under way, and no
others: a group begun before step s is trained at step s + max_staleness at the latest, so no token
is staler than that. The bound paces what is begun; nothing is thrown away, and nothing is trained
because it was quick.
"""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from anyio import create_task_group

from whet.config import RunConfig
from whet.protocols import Algorithm, Collector, StepLog, Trainer
from whet.step import Drawn, Plan, Stopwatch, draw, first_group, learn, take_up
from whet.types import Rollout, StepRecord


async def train(
    plan: Plan,
    config: RunConfig,
    *,
    checkpoints: Path,
    collector: Collector,
    algorithm: Algorithm,
    trainer: Trainer,
    log: StepLog,
) -> AsyncGenerator[StepRecord]:
    """Do the steps that are not done yet, in order; yield each once it is durable.

    A step happened if and only if the log has it, as in the on-policy loop. What was begun ahead
    and not consumed is found where it stands, under the same ids.
    """
    done = await take_up(log, trainer, checkpoints)
    for step in range(len(done), config.steps):
        watch = Stopwatch()
        ahead = _ahead(plan, done, config)
        await collector.begin(ahead)
        drawn = await draw(plan, done, config, watch, collector=collector, algorithm=algorithm)
        checkpoint = f"step-{step:06d}"
        async with _sampler_watched(collector, _rest(ahead, drawn), watch):
            metrics = await learn(drawn, done, config, watch, trainer)
            with watch.phase("publish"):
                version = await trainer.publish()
            with watch.phase("save"):
                await trainer.save(checkpoints / checkpoint)
        record = StepRecord(
            step=step,
            version=version,
            checkpoint=checkpoint,
            consumed=tuple(rollout.id for rollout in drawn.rollouts),
            metrics=metrics | watch.seconds,
        )
        await log.commit(record)
        done.append(record)
        yield record


def _ahead(plan: Plan, done: Sequence[StepRecord], config: RunConfig) -> list[Rollout]:
    """The rollouts that may be under way before the next step: its own and later ones.

    Every step takes `tasks_per_step` groups or more, so a window of so many steps is a bound on
    staleness; and a window that ends with the last step leaves nothing over.
    """
    first = first_group(done, config)
    steps = min(config.loop.max_staleness + 1, config.steps - len(done))
    groups = range(first, first + steps * config.tasks_per_step)
    return [rollout for group in groups for rollout in plan(group)]


def _rest(ahead: Sequence[Rollout], drawn: Drawn) -> list[str]:
    taken = {rollout.id for rollout in drawn.rollouts}
    return [rollout.id for rollout in ahead if rollout.id not in taken]


@asynccontextmanager
async def _sampler_watched(
    collector: Collector, rollouts: Sequence[str], watch: Stopwatch
) -> AsyncGenerator[None]:
    """Time how long, of the time inside, all of these rollouts have ended: nobody samples."""
    ended: list[float] = []

    async def wait() -> None:
        await collector.wait(rollouts)
        ended.append(time.monotonic())

    try:
        async with create_task_group() as tasks:
            tasks.start_soon(wait)
            yield
            tasks.cancel_scope.cancel()
    except ExceptionGroup as group:  # what failed inside, as it was
        raise group.exceptions[0] from group
    idle = time.monotonic() - ended[0] if ended else 0.0
    watch.seconds["sampler_wait_seconds"] = idle
