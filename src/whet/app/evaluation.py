"""Before and after, on the same held-out tasks: accuracy, and how sure we are of the gain."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from pydantic import JsonValue

from whet.config import RunConfig
from whet.protocols import AttemptLog, Collector
from whet.types import Mode, Rollout, SamplingOverride


@dataclass(frozen=True, slots=True)
class Scores:
    """Rewards by task; None where the rollout failed."""

    greedy: tuple[float | None, ...]
    sampled: tuple[float | None, ...]

    @property
    def failed(self) -> int:
        return sum(score is None for score in (*self.greedy, *self.sampled))


def evaluation_rollouts(when: str, tasks: Sequence[JsonValue], config: RunConfig) -> list[Rollout]:
    """One greedy and one sampled rollout of every task. Their ids make a repeat a look-up."""
    ways = {"greedy": 0.0, "sampled": config.evaluation.temperature}
    return [
        Rollout(
            id=f"{when}-{way}-{number:05d}",
            group=f"{when}-{way}-{number:05d}",
            task=task,
            mode=Mode.VAL,
            sampling=SamplingOverride(temperature=temperature),
            timeout_s=config.runner.timeout_s,
            max_attempts=config.runner.max_attempts,
        )
        for way, temperature in ways.items()
        for number, task in enumerate(tasks)
    ]


async def evaluate(rollouts: Sequence[Rollout], *, collector: Collector, log: AttemptLog) -> Scores:
    """Run evaluation rollouts, or find them done, and read their scores."""
    await collector.collect(rollouts)
    ids = [rollout.id for rollout in rollouts]
    scored = {t.attempt.rollout.id: t.reward for t in await log.trajectories(ids)}
    scores = [scored.get(id) for id in ids]
    half = len(scores) // 2
    return Scores(greedy=tuple(scores[:half]), sampled=tuple(scores[half:]))


def mean(scores: Sequence[float | None]) -> float:
    """Over the rollouts that did not fail."""
    known = [score for score in scores if score is not None]
    return fmean(known) if known else 0.0


def gain_interval(
    before: Sequence[float | None],
    after: Sequence[float | None],
    *,
    resamples: int,
    seed: int = 0,
) -> tuple[float, float]:
    """The 95 % interval of the mean gain per task, by a paired bootstrap over tasks.

    Paired: a task is drawn with both its scores, so what is hard for both does not blur the gain.
    Tasks that failed on either side are left out.
    """
    gains = [b - a for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    if not gains:
        return (0.0, 0.0)
    draw = random.Random(seed)
    means = sorted(fmean(draw.choices(gains, k=len(gains))) for _ in range(resamples))
    return (means[int(0.025 * resamples)], means[int(0.975 * resamples) - 1])
