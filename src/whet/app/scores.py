"""What rewards say about a model, and how sure we are: every measure is one number a task."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from whet.types import Failure

PerTask = Sequence[float | None]
"""One number for each task; None where it is not known, because rollouts failed."""

CHUNK = 1 << 20
"""Draws made at once, which bounds memory."""


class Interval(NamedTuple):
    """Of 95 %."""

    low: float
    high: float


class Estimate(NamedTuple):
    """A mean over tasks, with its interval."""

    mean: float
    ci95: Interval
    tasks: int
    """That were counted; the others failed."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The rewards of one model; None where a rollout failed."""

    greedy: tuple[float | None, ...] = ()
    """By task."""
    sampled: tuple[tuple[float | None, ...], ...] = ()
    """By task, its samples."""
    failures: tuple[Failure, ...] = ()
    """Of the rollouts that failed."""

    @property
    def tasks(self) -> int:
        return max(len(self.greedy), len(self.sampled))

    @property
    def rewards(self) -> list[float]:
        """All of them, of whatever task."""
        every = (*self.greedy, *(reward for samples in self.sampled for reward in samples))
        return [reward for reward in every if reward is not None]


def measures(scores: Scores, *, pass_reward: float) -> dict[str, PerTask]:
    """What is said of a model, by name; the first is what it is judged by."""
    found: dict[str, PerTask] = {}
    if scores.greedy:
        found["greedy"] = scores.greedy
    samples = max(map(len, scores.sampled), default=0)
    if samples:
        found["sampled"] = [_mean(_known(each)) for each in scores.sampled]
    for k in _powers_of_two(samples):
        found[f"pass@{k}"] = [pass_at_k(_known(s), k, pass_reward) for s in scores.sampled]
    return found


def pass_at_k(rewards: Sequence[float], k: int, pass_reward: float) -> float | None:
    """The chance that one of k samples passes, without bias (arXiv:2107.03374).

    None if there are fewer than k.
    """
    count = len(rewards)
    failing = sum(reward < pass_reward for reward in rewards)
    return 1 - math.comb(failing, k) / math.comb(count, k) if count >= k else None


def mean(values: PerTask) -> float:
    """Over the tasks that are known."""
    return _mean(_known(values)) or 0.0


def estimate(values: PerTask, *, resamples: int) -> Estimate:
    """The mean, with an interval by a bootstrap over tasks."""
    known = _known(values)
    return Estimate(_mean(known) or 0.0, _bootstrap(known, resamples), len(known))


def gain(before: PerTask, after: PerTask, *, resamples: int) -> Estimate:
    """The mean gain per task, with an interval by a paired bootstrap over tasks.

    Paired: a task is drawn with both its scores, so what is hard for both does not blur the gain.
    Tasks that failed on either side are left out.
    """
    pairs = zip(before, after, strict=True)
    return estimate(
        [None if a is None or b is None else b - a for a, b in pairs], resamples=resamples
    )


def failure_counts(scores: Scores) -> Mapping[str, tuple[int, str]]:
    """How many rollouts failed for each kind of reason, with the message of one."""
    counts: dict[str, tuple[int, str]] = {}
    for failure in scores.failures:
        count, example = counts.get(failure.kind, (0, failure.message))
        counts[str(failure.kind)] = count + 1, example
    return counts


def _bootstrap(values: Sequence[float], resamples: int, seed: int = 0) -> Interval:
    if not values:
        return Interval(0.0, 0.0)
    drawn = np.random.default_rng(seed)
    array = np.asarray(values)
    step = max(1, CHUNK // len(values))
    means = np.concatenate(
        [
            array[drawn.integers(0, len(values), (min(step, resamples - done), len(values)))].mean(
                axis=1
            )
            for done in range(0, resamples, step)
        ]
    )
    means.sort()
    low, high = means[int(0.025 * resamples)], means[int(0.975 * resamples) - 1]
    return Interval(float(low), float(high))


def _known(values: PerTask) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _powers_of_two(samples: int) -> list[int]:
    """Of how many samples at least one must pass: 1, 2, 4 and so on, and all there are."""
    if samples < 2:
        return []  # one sample passes or not: its reward says so
    return [*(1 << n for n in range(samples.bit_length()) if 1 << n < samples), samples]
