"""The training loop, on one screen."""

import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from statistics import fmean

from whet.config import RunConfig
from whet.protocols import Algorithm, Collector, StepLog, Trainer
from whet.rows import Rows, build_rows, normalise
from whet.selection import select
from whet.types import Group, Rollout, StepRecord

logger = logging.getLogger(__name__)


async def train(
    plan: Callable[[int], Sequence[Rollout]],
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
    done = await log.steps()
    if done:
        await trainer.restore(checkpoints / done[-1].checkpoint)
    for step in range(len(done), config.steps):
        rollouts = plan(step)
        began = time.monotonic()
        groups = await collector.collect(rollouts)
        collected = time.monotonic()
        credits = [credit for group in groups for credit in algorithm.credit(group)]
        built = build_rows(select(credits, config.selection))
        metrics: dict[str, float] = {}
        if built.rows:
            rows = normalise(built.rows, config.loss)
            metrics |= await trainer.forward_backward(rows, config.loss)
            metrics |= await trainer.optim_step(config.adam.at(step, config.steps))
        else:
            logger.warning("no group has a learning signal step=%d", step)
        version = await trainer.publish()
        metrics |= _measure(rollouts, groups, built)
        metrics |= {
            "collect_seconds": collected - began,
            "train_seconds": time.monotonic() - collected,
        }
        record = StepRecord(
            step=step,
            version=version,
            checkpoint=f"step-{step:06d}",
            consumed=tuple(rollout.id for rollout in rollouts),
            metrics=metrics,
        )
        await trainer.save(checkpoints / record.checkpoint)
        await log.commit(record)
        yield record


def _measure(rollouts: Sequence[Rollout], groups: Sequence[Group], built: Rows) -> dict[str, float]:
    """The standing numbers of a step."""
    trajectories = [trajectory for group in groups for trajectory in group]
    silent = sum(1 for group in groups if len({t.reward for t in group}) < 2)
    return {
        "reward": fmean(t.reward for t in trajectories) if trajectories else 0.0,
        "rollouts": len(rollouts),
        "failed_rollouts": len(rollouts) - len(trajectories),
        "calls": sum(len(t.calls) for t in trajectories),
        "rows": len(built.rows),
        "trained_rollouts": len({row.rollout for row in built.rows}),
        "unproven_rows": len(built.unproven),
        "constrained_generations": len(built.constrained),
        "row_tokens": sum(len(row.tokens) for row in built.rows),
        "silent_groups": silent / len(groups) if groups else 0.0,
    }
