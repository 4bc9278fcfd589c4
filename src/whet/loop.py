"""The training loop, on one screen."""

from collections.abc import AsyncGenerator
from pathlib import Path

from whet.config import RunConfig
from whet.protocols import Algorithm, Collector, StepLog, Trainer
from whet.step import Plan, Stopwatch, draw, learn, take_up
from whet.types import StepRecord


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

    A step happened if and only if the log has it. Killed before that, the next run restores the
    checkpoint before it, finds the step's rollouts where they stand, and does it again.
    """
    done = await take_up(log, trainer, checkpoints)
    for step in range(len(done), config.steps):
        watch = Stopwatch()
        drawn = await draw(plan, done, config, watch, collector=collector, algorithm=algorithm)
        with watch.phase("sampler_wait"):  # on policy nobody samples while there is training
            metrics = await learn(drawn, done, config, watch, trainer)
            with watch.phase("publish"):
                version = await trainer.publish()
            with watch.phase("save"):
                await trainer.save(checkpoints / f"step-{step:06d}")
        record = StepRecord(
            step=step,
            version=version,
            checkpoint=f"step-{step:06d}",
            consumed=tuple(rollout.id for rollout in drawn.rollouts),
            metrics=metrics | watch.seconds,
        )
        await log.commit(record)
        done.append(record)
        yield record
