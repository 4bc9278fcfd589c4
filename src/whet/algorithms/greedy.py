"""Likelihood training on successful greedy generations."""

from collections.abc import Sequence
from dataclasses import dataclass

from whet.algorithms.returns import score
from whet.config import AlgorithmConfig
from whet.protocols import Algorithm
from whet.types import Credit, Group, StepRecord


@dataclass(frozen=True, slots=True)
class GreedyOutputs(Algorithm):
    """Advantage is 1 where the reward reaches `success_threshold`; other rollouts are left out.

    Training rollouts are sampled at temperature 0, as in a greedy evaluation. There is no
    exploration: it reinforces what the model already gets right.
    """

    config: AlgorithmConfig

    async def credit(self, groups: Sequence[Group], past: Sequence[StepRecord]) -> list[Credit]:
        threshold = self.config.success_threshold
        everything = [trajectory for group in groups for trajectory in group]
        return [Credit.even(t, 1.0) for t in everything if score(t, self.config) >= threshold]
