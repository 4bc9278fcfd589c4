"""Measures of a model from its rewards, one number a task, with 95 % intervals over tasks.

Where rewards lie between 0 and 1, an interval is computed from the tasks and a few more at the
bounds: for a mean two of 0 and two of 1 (Agresti and Coull, 1998), for a gain half a task lost,
half a task won and one unchanged (Agresti and Min, 2005). It keeps a width where all tasks are
solved, or none, and covers the truth at least 92 % of the time from 5 tasks on. Other rewards have
no bounds, and get Student's t.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import correlation
from typing import NamedTuple

from whet.types import Failure, FailureKind

AGENT_FAILURES = frozenset(
    {FailureKind.AGENT, FailureKind.CONTEXT_LENGTH, FailureKind.TIMEOUT, FailureKind.BAD_REWARD}
)
"""Failures that count as a reward of 0: a model that breaks its agent is not better for it. Other
failures, of workers, gateways and producers, say nothing about the model and are left out."""

Z = 1.959964
"""The 97.5 % quantile of the normal distribution."""


class Interval(NamedTuple):
    """A 95 % confidence interval."""

    low: float
    high: float


class Estimate(NamedTuple):
    """A mean over tasks, with its interval."""

    mean: float
    ci95: Interval | None
    """None for a single task whose reward has no bounds."""
    tasks: int


@dataclass(frozen=True, slots=True)
class Scores:
    """The rewards of one model; None for a failed rollout that says nothing about its agent."""

    greedy: tuple[float | None, ...] = ()
    """Reward by task."""
    sampled: tuple[tuple[float | None, ...], ...] = ()
    """Rewards of the samples, by task."""
    failures: tuple[Failure, ...] = ()
    """Failures of the rollouts that failed, whether or not they count as a reward."""
    failed_tasks: tuple[int, ...] = ()
    """The task of each failure."""

    @property
    def tasks(self) -> int:
        return max(len(self.greedy), len(self.sampled))

    @property
    def rollouts(self) -> int:
        return len(self.greedy) + sum(map(len, self.sampled))

    @property
    def has_only_failures(self) -> bool:
        """Whether every rollout failed."""
        return 0 < self.rollouts == len(self.failures)

    def get_task_rewards(self, task: int) -> tuple[float | None, ...]:
        """All rewards of one task."""
        greedy = self.greedy[task : task + 1]
        return (*greedy, *(self.sampled[task] if self.sampled else ()))

    @property
    def rewards(self) -> list[float]:
        """All rewards, of all tasks."""
        every = (*self.greedy, *(reward for samples in self.sampled for reward in samples))
        return [reward for reward in every if reward is not None]


def compute_measures(
    scores: Scores, tasks: Sequence[int], *, pass_threshold: float
) -> dict[str, list[float]]:
    """Each measure by name, one number for each of these complete tasks; the first is the headline
    measure."""
    found: dict[str, list[float]] = {}
    if scores.greedy:
        found["greedy"] = _drop_unknown([scores.greedy[task] for task in tasks])
    samples = max(map(len, scores.sampled), default=0)
    sampled = [_drop_unknown(scores.sampled[task]) for task in tasks] if samples else []
    if samples:
        found["sampled"] = [math.fsum(each) / samples for each in sampled]
    for k in _list_powers_of_two(samples):
        found[f"pass@{k}"] = [compute_pass_at_k(each, k, pass_threshold) for each in sampled]
    return found


def compute_pass_at_k(rewards: Sequence[float], k: int, pass_threshold: float) -> float:
    """Unbiased pass@k (arXiv:2107.03374) of at least k samples."""
    failing = sum(reward < pass_threshold for reward in rewards)
    return 1 - math.comb(failing, k) / math.comb(len(rewards), k)


def complete_tasks(scores: Sequence[Scores]) -> list[int]:
    """Tasks of which every model has every reward: the tasks of all measures of a table."""
    return [
        task
        for task in range(max((each.tasks for each in scores), default=0))
        if all(None not in each.get_task_rewards(task) for each in scores)
    ]


def estimate(values: Sequence[float], *, bounded: bool) -> Estimate | None:
    """Mean with its interval; None without tasks. `bounded` values are between 0 and 1."""
    pseudo = ((0.0, 2.0), (1.0, 2.0)) if bounded else ()
    return _estimate(values, pseudo, Interval(0.0, 1.0))


def estimate_gain(
    before: Sequence[float], after: Sequence[float], *, bounded: bool
) -> Estimate | None:
    """Mean gain per task with a paired interval: how hard tasks are does not widen it."""
    gains = [b - a for a, b in zip(before, after, strict=True)]
    pseudo = ((-1.0, 0.5), (0.0, 1.0), (1.0, 0.5)) if bounded else ()
    return _estimate(gains, pseudo, Interval(-1.0, 1.0))


def count_failures_by_kind(scores: Scores) -> Mapping[str, tuple[int, str]]:
    """Count of failed rollouts by kind of failure, with the message of one."""
    counts: dict[str, tuple[int, str]] = {}
    for failure in scores.failures:
        count, example = counts.get(failure.kind, (0, failure.message))
        counts[str(failure.kind)] = count + 1, example
    return counts


def _estimate(
    values: Sequence[float], pseudo: Sequence[tuple[float, float]], bounds: Interval
) -> Estimate | None:
    """Estimate with pseudo-tasks, each a value and its weight, or by Student's t without any."""
    if not values:
        return None
    mean, count = math.fsum(values) / len(values), len(values)
    if not pseudo:
        if count == 1:
            return Estimate(mean, None, count)
        variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
        reach = _compute_student(count - 1) * math.sqrt(variance / count)
        return Estimate(mean, Interval(mean - reach, mean + reach), count)
    weighed = [*((value, 1.0) for value in values), *pseudo]
    weight = math.fsum(w for _, w in weighed)
    center = math.fsum(value * w for value, w in weighed) / weight
    variance = math.fsum(w * (value - center) ** 2 for value, w in weighed) / weight
    reach = Z * math.sqrt(variance / weight)
    low, high = max(bounds.low, center - reach), min(bounds.high, center + reach)
    return Estimate(mean, Interval(low, high), count)


def correlate(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Return Pearson's correlation; None if one side does not vary."""
    varies = len(set(left)) > 1 and len(set(right)) > 1
    return correlation(left, right) if varies else None


def _compute_student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, to 1 %: Cornish and Fisher's series in 1 / freedom."""
    if freedom <= 2:
        return (12.7062, 4.3027)[freedom - 1]
    terms = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
    )
    return Z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def _drop_unknown(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _list_powers_of_two(samples: int) -> list[int]:
    """The k of pass@k: powers of two below the number of samples, and that number."""
    if samples < 2:
        return []  # pass@1 of one sample is its reward
    return [*(1 << n for n in range(samples.bit_length()) if 1 << n < samples), samples]
