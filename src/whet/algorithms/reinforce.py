"""REINFORCE with a running baseline."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from whet.algorithms.baselines import Baseline, Baselines, GroupScores, compare
from whet.config import AlgorithmConfig
from whet.protocols import Algorithm
from whet.types import LENGTH_PENALTY, Credit, Group, StepRecord


@dataclass(frozen=True, slots=True)
class Reinforce(Algorithm):
    """Advantage is reward minus the running mean of the rewards of earlier steps (Williams 1992).

    It needs no groups: one rollout per task is enough. The mean is read from the completed steps,
    not kept in memory. The first step is compared with its own mean.
    """

    config: AlgorithmConfig

    async def credit(self, groups: Sequence[Group], past: Sequence[StepRecord]) -> list[Credit]:
        before = self._compute_running_mean(past)

        def compute_baselines(scores: GroupScores) -> Baselines:
            everything = [score for group in scores for score in group]
            mean = fmean(everything) if before is None and everything else before or 0.0
            return [
                [Baseline(mean)] * len(group) if any(score != mean for score in group) else None
                for group in scores
            ]

        return compare(groups, self.config, compute_baselines)

    def _compute_running_mean(self, past: Sequence[StepRecord]) -> float | None:
        mean = None
        decay = self.config.baseline_decay
        for record in past:
            metrics = record.metrics
            if "reward" in metrics:
                further = (LENGTH_PENALTY, *self.config.reward_keys)
                keys = ("reward", *(f"reward/{key}" for key in further))
                # A key that was added on resume is in no earlier step.
                reward = sum(metrics.get(key, 0.0) for key in keys)
                mean = reward if mean is None else decay * mean + (1 - decay) * reward
        return mean
