"""A model on held-out tasks, greedily and sampled: which rollouts that takes, and their scores."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from whet.app.scores import Scores
from whet.config import RunConfig
from whet.errors import ConfigError
from whet.protocols import Collector, Directory
from whet.types import TERMINAL, Mode, Rollout, RolloutRecord, SamplingOverride

PAGE = 1000


@dataclass(frozen=True, slots=True)
class Trial:
    """One rollout of an evaluation."""

    rollout: Rollout
    task: int
    """Its place among the tasks."""
    way: Literal["greedy", "sampled"]
    sample: int
    """0 for the first of a task, and for the greedy one."""


def plan_trials(when: str, tasks: Sequence[JsonValue], config: RunConfig) -> list[Trial]:
    """Every task, greedily and sampled. The ids of the rollouts make a repeat a look-up.

    Raises:
        ConfigError: the config asks for neither.
    """
    asked = config.evaluation
    if not (asked.greedy or asked.samples):
        raise ConfigError("an evaluation is greedy or sampled: set evaluation.samples to 1 or more")
    trials: list[Trial] = []
    if asked.greedy:
        for number, task in enumerate(tasks):
            id = f"{when}-greedy-{number:05d}"
            trials.append(Trial(_rollout(id, id, task, 0.0, config), number, "greedy", 0))
    for sample in range(asked.samples):
        for number, task in enumerate(tasks):
            group = f"{when}-sampled-{number:05d}"
            id = f"{group}-{sample:03d}"
            rollout = _rollout(id, group, task, asked.temperature, config)
            trials.append(Trial(rollout, number, "sampled", sample))
    return trials


async def evaluate(
    trials: Sequence[Trial], *, collector: Collector, directory: Directory
) -> dict[str, RolloutRecord]:
    """Run the rollouts, or find them done: how each ended, by id."""
    await collector.collect([trial.rollout for trial in trials])
    return await ended_rollouts(directory)


async def ended_rollouts(directory: Directory) -> dict[str, RolloutRecord]:
    """What has been evaluated so far, by id."""
    return {
        record.rollout.id: record
        async for record in _evaluated(directory)
        if record.status in TERMINAL
    }


def read_scores(trials: Sequence[Trial], ended: dict[str, RolloutRecord]) -> Scores:
    """The rewards of finished trials, by task."""
    greedy: dict[int, float | None] = {}
    sampled: dict[int, list[float | None]] = {}
    for trial in trials:
        reward = ended[trial.rollout.id].reward
        if trial.way == "greedy":
            greedy[trial.task] = reward
        else:
            sampled.setdefault(trial.task, []).append(reward)
    failures = [ended[trial.rollout.id].failure for trial in trials]
    return Scores(
        greedy=tuple(greedy.values()),
        sampled=tuple(tuple(samples) for samples in sampled.values()),
        failures=tuple(failure for failure in failures if failure is not None),
    )


async def _evaluated(directory: Directory) -> AsyncGenerator[RolloutRecord]:
    page = await directory.rollouts(mode=Mode.VAL, limit=PAGE)
    while page:
        for record in page:
            yield record
        page = await directory.rollouts(mode=Mode.VAL, after=page[-1].rollout.id, limit=PAGE)


def _rollout(
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
    )
