"""Likelihood training on the best of each group."""

from collections.abc import Sequence

from whet.algorithms.returns import score
from whet.config import AlgorithmConfig
from whet.protocols import Algorithm
from whet.types import Credit, Group, StepRecord


class BestOfN(Algorithm):
    """Advantage is 1 for the best rollout of a group; the others are left out.

    The first among equals; a group whose rewards are all equal has no best and is dropped.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config

    async def credit(self, groups: Sequence[Group], past: Sequence[StepRecord]) -> list[Credit]:
        credits: list[Credit] = []
        for group in groups:
            scores = [score(trajectory, self._config) for trajectory in group]
            if len(set(scores)) > 1:
                credits.append(Credit.even(group[scores.index(max(scores))], 1.0))
        return credits
