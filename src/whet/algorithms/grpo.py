"""Group relative policy optimization (GRPO)."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from whet.algorithms.baselines import Baseline, Baselines, GroupScores, compare, has_signal
from whet.config import AlgorithmConfig
from whet.protocols import Algorithm
from whet.types import Credit, Group, StepRecord

EPSILON = 1e-6
"""Added to standard deviations, so that rounding differences give no signal."""


@dataclass(frozen=True, slots=True)
class GRPO(Algorithm):
    """Advantage is reward minus the group's mean (arXiv:2402.03300).

    Not divided by the standard deviation unless asked: that weights a task by how often it is
    solved (arXiv:2503.20783). A group whose rewards are all equal has no signal and is dropped,
    so no forward pass is spent on it.
    """

    config: AlgorithmConfig

    async def credit(self, groups: Sequence[Group], past: Sequence[StepRecord]) -> list[Credit]:
        return compare(groups, self.config, self._compute_baselines)

    def _compute_baselines(self, scores: GroupScores) -> Baselines:
        return [self._group_baselines(group) for group in scores]

    def _group_baselines(self, scores: Sequence[float]) -> Sequence[Baseline] | None:
        if not has_signal(scores):
            return None
        scale = stdev(scores) + EPSILON if self.config.divide_by_std else 1.0
        return [Baseline(fmean(scores), scale)] * len(scores)
