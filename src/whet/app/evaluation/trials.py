"""The rollouts of an evaluation, greedy and sampled, and the scores they give."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from whet.app.evaluation.statistics import AGENT_FAILURES, Scores
from whet.config import RunConfig
from whet.errors import ConfigError
from whet.io.paging import iterate_pages
from whet.protocols import Collector, Listings
from whet.types import RETRYABLE, TERMINAL, Mode, Rollout, RolloutRecord, SamplingOverride

RETRIED = tuple(kind for kind in RETRYABLE if kind not in AGENT_FAILURES)
"""Failures after which a rollout is tried again: none that the model may have caused."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One rollout of an evaluation."""

    rollout: Rollout
    task: int
    """Index of the task."""
    way: Literal["greedy", "sampled"]
    sample: int
    """Index among the samples of the task; 0 for the greedy rollout."""


def plan_trials(when: str, tasks: Sequence[JsonValue], config: RunConfig) -> list[Trial]:
    """Plan the rollouts of every task. Their ids are stable, so a resumed evaluation finds them.

    Raises:
        ConfigError: the config has neither greedy nor sampled rollouts.
    """
    settings = config.evaluation
    if not (settings.greedy or settings.samples):
        raise ConfigError("nothing to evaluate: set evaluation.greedy, or evaluation.samples >= 1")
    trials: list[Trial] = []
    if settings.greedy:
        for number, task in enumerate(tasks):
            id = f"{when}-greedy-{number:05d}"
            trials.append(Trial(_build_rollout(id, id, task, 0.0, config), number, "greedy", 0))
    for sample in range(settings.samples):
        for number, task in enumerate(tasks):
            group = f"{when}-sampled-{number:05d}"
            id = f"{group}-{sample:03d}"
            rollout = _build_rollout(id, group, task, settings.temperature, config)
            trials.append(Trial(rollout, number, "sampled", sample))
    return trials


async def run_trials(
    trials: Sequence[Trial], *, collector: Collector, listings: Listings
) -> dict[str, RolloutRecord]:
    """Run the rollouts that have not ended; returns the records of all, by id."""
    await collector.collect([trial.rollout for trial in trials])
    return await read_ended_rollouts(listings)


async def read_ended_rollouts(listings: Listings) -> dict[str, RolloutRecord]:
    """The evaluation rollouts that have ended, by id."""
    return {
        record.rollout.id: record
        async for page in iterate_pages(listings, mode=Mode.VAL)
        for record in page
        if record.status in TERMINAL
    }


def read_scores(trials: Sequence[Trial], ended: dict[str, RolloutRecord]) -> Scores:
    """Collect the rewards of ended trials, by task."""
    greedy: dict[int, float | None] = {}
    sampled: dict[int, list[float | None]] = {}
    for trial in trials:
        reward = _read_reward(ended[trial.rollout.id])
        if trial.way == "greedy":
            greedy[trial.task] = reward
        else:
            sampled.setdefault(trial.task, []).append(reward)
    failed = [(t.task, failure) for t in trials if (failure := ended[t.rollout.id].failure)]
    return Scores(
        greedy=tuple(greedy.values()),
        sampled=tuple(tuple(samples) for samples in sampled.values()),
        failures=tuple(failure for _, failure in failed),
        failed_tasks=tuple(task for task, _ in failed),
    )


def _read_reward(record: RolloutRecord) -> float | None:
    """Reward of an ended rollout; None if its failure says nothing about its agent."""
    if record.failure is not None and record.failure.kind in AGENT_FAILURES:
        return 0.0
    return record.reward


def _build_rollout(
    id: str, group: str, task: JsonValue, temperature: float, config: RunConfig
) -> Rollout:
    return Rollout(
        id=id,
        group=group,
        task=task,
        mode=Mode.VAL,
        sampling=SamplingOverride(temperature=temperature),
        timeout_s=config.runner.timeout_s,
        max_attempts=config.runner.max_attempts,
        retried=RETRIED,
    )
