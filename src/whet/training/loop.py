"""The on-policy training loop, on one screen."""

from collections.abc import AsyncGenerator
from pathlib import Path

from whet.config import RunConfig
from whet.protocols import Algorithm, Collector, StepLog, TrainingBackend
from whet.training.checkpoints import Checkpoints
from whet.training.step import (
    Evaluate,
    Plan,
    Stopwatch,
    Update,
    collect_step,
    evaluate_step,
    update_policy,
)
from whet.training.stopping import explain_stop
from whet.types import StepRecord


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

    A step happened if and only if the log has it. After a crash before that, the next process finds
    the step's rollouts in the store, and repeats it; `restore_steps` gives it the weights.
    """
    done = await log.steps()
    async with Checkpoints(checkpoints, trainer, config) as writer:
        while len(done) < config.steps and not explain_stop(done, config):
            step = len(done)
            timer = Stopwatch()
            batch = await collect_step(
                plan, done, config, timer, collector=collector, algorithm=algorithm
            )
            with timer.phase("sampler_wait"):  # on-policy: the engine idles during the update
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
            with timer.phase("sampler_wait"), timer.phase("save"):
                await writer.save([*done, record])
            record = record.model_copy(update={"metrics": metrics | timer.read()})
            await log.commit(record, advantages=batch.advantages())
            done.append(record)
            yield record
        await writer.finish(done)
