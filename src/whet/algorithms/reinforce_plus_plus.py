"""REINFORCE++: normalized over the whole step."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from whet.algorithms.baselines import Baseline, Baselines, GroupScores, compare, has_signal
from whet.algorithms.grpo import EPSILON
from whet.config import AlgorithmConfig
from whet.protocols import Algorithm
from whet.types import Credit, Group, StepRecord


@dataclass(frozen=True, slots=True)
class ReinforcePlusPlus(Algorithm):
    """Advantage is reward minus the step's mean, by the step's deviation (arXiv:2501.03262).

    With `group_baseline` each group's mean is subtracted first, and the deviation is that of the
    residuals, so that hard and easy tasks are each compared with themselves.
    """

    config: AlgorithmConfig

    async def credit(self, groups: Sequence[Group], past: Sequence[StepRecord]) -> list[Credit]:
        return compare(groups, self.config, self._compute_baselines)

    def _compute_baselines(self, scores: GroupScores) -> Baselines:
        everything = [score for group in scores for score in group]
        if not has_signal(everything):
            return [None] * len(scores)
        if not self.config.group_baseline:
            baseline = Baseline(fmean(everything), stdev(everything) + EPSILON)
            return [[baseline] * len(group) for group in scores]
        means = [fmean(group) if group else 0.0 for group in scores]
        left = [s - mean for group, mean in zip(scores, means, strict=True) for s in group]
        scale = stdev(left) + EPSILON
        return [
            [Baseline(mean, scale)] * len(group) if has_signal(group) else None
            for group, mean in zip(scores, means, strict=True)
        ]
