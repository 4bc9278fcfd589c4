"""One training step, as both loops do it: draw groups, give credit, build rows, learn, measure."""

import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev

from whet.config import RunConfig
from whet.errors import ConfigError, boundary
from whet.protocols import Algorithm, Collector, StepLog, Trainer
from whet.rows import Rows, build_rows, normalise
from whet.selection import select
from whet.types import Credit, Group, Rollout, StepRecord, Trajectory

logger = logging.getLogger(__name__)

Plan = Callable[[int], Sequence[Rollout]]
"""The rollouts of the n-th group of a run, whatever steps there were: `group_size` of them."""


PHASES = ("collect", "credit", "train", "publish", "save", "sampler_wait")
"""Each is timed in every step, whether it came to it or not."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step learns from."""

    rollouts: tuple[Rollout, ...]
    groups: tuple[Group, ...]
    credits: tuple[Credit, ...]
    silent: int
    """Groups that got no credit."""


class Stopwatch:
    """Seconds of the phases of a step."""

    def __init__(self) -> None:
        self.seconds = {f"{name}_seconds": 0.0 for name in PHASES}

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Add the time inside to a phase."""
        began = time.monotonic()
        yield
        self.seconds[f"{name}_seconds"] += time.monotonic() - began


async def take_up(log: StepLog, trainer: Trainer, checkpoints: Path) -> list[StepRecord]:
    """The steps that are done, with the trainer where they left it."""
    done = await log.steps()
    if done:
        await trainer.restore(checkpoints / done[-1].checkpoint)
    return done


def first_group(done: Sequence[StepRecord], config: RunConfig) -> int:
    """The group the next step begins with: one after the last that was consumed."""
    return sum(len(record.consumed) for record in done) // config.group_size


def version_after(done: Sequence[StepRecord]) -> int:
    """The version of the policy that these steps made."""
    return done[-1].version if done else 0


async def draw(
    plan: Plan,
    done: Sequence[StepRecord],
    config: RunConfig,
    watch: Stopwatch,
    *,
    collector: Collector,
    algorithm: Algorithm,
) -> Drawn:
    """Take groups in the order of the plan until enough of them have a signal, or none are left.

    The outcomes of rollouts are durable and the plan is a function, so a step that is done again
    draws the same.
    """
    first = first_group(done, config)
    rollouts: list[Rollout] = []
    groups: list[Group] = []
    credits: list[Credit] = []
    speaking = 0
    left = config.tasks_per_step * config.algorithm.refill
    while (more := min(config.tasks_per_step - speaking, left)) > 0:
        wanted = [r for n in range(more) for r in plan(first + len(groups) + n)]
        left -= more
        rollouts += wanted
        with watch.phase("collect"):
            groups += await collector.collect(wanted)
        with watch.phase("credit"):
            credits = await _credit(algorithm, groups, done)
        speaking = len({credit.trajectory.attempt.rollout.group for credit in credits})
    return Drawn(tuple(rollouts), tuple(groups), tuple(credits), len(groups) - speaking)


async def learn(
    drawn: Drawn,
    done: Sequence[StepRecord],
    config: RunConfig,
    watch: Stopwatch,
    trainer: Trainer,
) -> dict[str, float]:
    """Update the policy that the steps before made; what there is to say about it."""
    built = build_rows(select(drawn.credits, config.selection))
    metrics: dict[str, float] = {}
    if built.rows:
        rows = normalise(built.rows, config.loss)
        with watch.phase("train"):
            metrics |= await trainer.forward_backward(rows, config.loss)
            metrics |= await trainer.optim_step(config.adam.at(len(done), config.steps))
    else:
        logger.warning("no group has a learning signal groups=%d", len(drawn.groups))
    return metrics | _of_rewards(drawn, config) | _of_rows(built, version_after(done))


async def _credit(
    algorithm: Algorithm, groups: Sequence[Group], done: Sequence[StepRecord]
) -> list[Credit]:
    name = type(algorithm).__name__
    with boundary(ConfigError, f"the algorithm {name} raised"):
        credits = await algorithm.credit(groups, done)
    known = {t.attempt.id: t for group in groups for t in group}
    for credit in credits:
        rollout = credit.trajectory.attempt.rollout.id
        if credit.trajectory.attempt.id not in known:
            raise ConfigError(f"the algorithm {name} gave credit to {rollout!r}, not of this step")
        _refuse_unusable(credit, name)
    if len({credit.trajectory.attempt.id for credit in credits}) < len(credits):
        raise ConfigError(f"the algorithm {name} gave credit to one trajectory twice")
    return credits


def _refuse_unusable(credit: Credit, name: str) -> None:
    lengths = {
        call.generation_id(index): len(generation.tokens)
        for call in credit.trajectory.calls
        for index, generation in enumerate(call.generations)
    }
    for id, advantage in credit.advantages.items():
        values = advantage if isinstance(advantage, tuple) else (advantage,)
        found = None
        if id not in lengths:
            found = "which is not one of its generations"
        elif isinstance(advantage, tuple) and len(advantage) != lengths[id]:
            found = f"{len(advantage)} numbers for {lengths[id]} tokens"
        elif not all(map(math.isfinite, values)):
            found = f"a number that is not finite: {advantage!r:.80}"
        if found:
            rollout = credit.trajectory.attempt.rollout.id
            raise ConfigError(
                f"the algorithm {name} credits generation {id!r} of rollout {rollout!r}, {found}"
            )


def _of_rewards(drawn: Drawn, config: RunConfig) -> dict[str, float]:
    trajectories = [trajectory for group in drawn.groups for trajectory in group]
    without = [t.attempt.rollout.id for t in trajectories if not t.calls]
    if without:
        logger.warning(
            "rollouts made no model call count=%d of=%d example=%s: is something cached, or the "
            "agent's base URL another one?",
            len(without),
            len(trajectories),
            without[0],
        )
    rewards = [trajectory.reward for trajectory in trajectories]
    keys = (*config.algorithm.reward_keys, *config.algorithm.logged_keys)
    return {
        "reward": _mean(rewards),
        "reward_std": pstdev(rewards) if rewards else 0.0,
        **{f"reward/{key}": _mean(_emitted(t, key) for t in trajectories) for key in keys},
        "groups": len(drawn.groups),
        "silent_groups": drawn.silent / len(drawn.groups),
        "rollouts": len(drawn.rollouts),
        "failed_rollouts": len(drawn.rollouts) - len(trajectories),
        "rollouts_without_calls": len(without),
        "calls": sum(len(trajectory.calls) for trajectory in trajectories),
    }


def _of_rows(built: Rows, version: int) -> dict[str, float]:
    spans = [span for row in built.rows for span in row.spans]
    ages = [version - of for span in spans for of in span.versions]
    return {
        "rows": len(built.rows),
        "trained_rollouts": len({row.rollout for row in built.rows}),
        "unproven_rows": len(built.unproven),
        "constrained_generations": len(built.constrained),
        "row_tokens": sum(len(row.tokens) for row in built.rows),
        "merge_ratio": len(spans) / len(built.rows) if built.rows else 0.0,
        "staleness": _mean(ages),
        "staleness_max": max(ages, default=0),
        "off_policy_tokens": _mean(age > 0 for age in ages),
    }


def _emitted(trajectory: Trajectory, key: str) -> float:
    return sum(r.value for r in trajectory.rewards if r.key == key)


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return fmean(known) if known else 0.0
