"""Likelihood training on the best rollout of each group."""

from collections.abc import Sequence
from dataclasses import dataclass

from whet.algorithms.baselines import has_signal
from whet.algorithms.returns import score
from whet.config import AlgorithmConfig
from whet.protocols import Algorithm
from whet.types import Credit, Group, StepRecord


@dataclass(frozen=True, slots=True)
class BestOfN(Algorithm):
    """Advantage is 1 for the best rollout of a group; the others are left out.

    The first of equally good ones; a group whose rewards are all equal is dropped.
    """

    config: AlgorithmConfig

    async def credit(self, groups: Sequence[Group], past: Sequence[StepRecord]) -> list[Credit]:
        credits: list[Credit] = []
        for group in groups:
            scores = [score(trajectory, self.config) for trajectory in group]
            if has_signal(scores):
                credits.append(Credit.even(group[scores.index(max(scores))], 1.0))
        return credits
