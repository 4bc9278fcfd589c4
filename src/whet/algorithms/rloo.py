"""REINFORCE with a leave-one-out baseline (RLOO)."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from whet.algorithms.baselines import Baseline, Baselines, GroupScores, compare, has_signal
from whet.config import AlgorithmConfig
from whet.protocols import Algorithm
from whet.types import Credit, Group, StepRecord


@dataclass(frozen=True, slots=True)
class RLOO(Algorithm):
    """Advantage is reward minus the mean of the group's other rollouts (arXiv:2402.14740).

    A baseline without the rollout itself is unbiased. It is GRPO's advantage times n / (n - 1);
    groups whose rewards are all equal are dropped as there.
    """

    config: AlgorithmConfig

    async def credit(self, groups: Sequence[Group], past: Sequence[StepRecord]) -> list[Credit]:
        return compare(groups, self.config, _compute_baselines)


def _compute_baselines(scores: GroupScores) -> Baselines:
    return [_group_baselines(group) for group in scores]


def _group_baselines(scores: Sequence[float]) -> Sequence[Baseline] | None:
    if not has_signal(scores):
        return None
    return [Baseline(fmean([*scores[:i], *scores[i + 1 :]])) for i in range(len(scores))]
