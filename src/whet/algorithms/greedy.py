"""Reinforce greedy answers that are right."""

from collections.abc import Sequence

from whet.algorithms.returns import score
from whet.config import AlgorithmConfig
from whet.protocols import Algorithm
from whet.types import Credit, Group, StepRecord


class GreedyOutputs(Algorithm):
    """Advantage is 1 for a rollout whose reward reaches `success`; the others are left out.

    Training rollouts are sampled at temperature 0, as an evaluation would: what is reinforced is
    what the model will say. It explores nothing, so it makes firm what is already there.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config

    async def credit(self, groups: Sequence[Group], past: Sequence[StepRecord]) -> list[Credit]:
        right = self._config.success
        everything = [trajectory for group in groups for trajectory in group]
        return [Credit.even(t, 1.0) for t in everything if score(t, self._config) >= right]
