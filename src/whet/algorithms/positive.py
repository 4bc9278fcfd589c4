"""REINFORCE on positive rewards only."""

from collections.abc import Sequence
from dataclasses import dataclass

from whet.algorithms.returns import score
from whet.config import AlgorithmConfig
from whet.protocols import Algorithm
from whet.types import Credit, Group, StepRecord


@dataclass(frozen=True, slots=True)
class PositiveOnly(Algorithm):
    """Advantage is the reward where it is above zero; everything else is left out.

    With rewards of 0 and 1 this is likelihood training on the successes. No token is ever made
    less likely, so training is stable, and slow where successes are common.
    """

    config: AlgorithmConfig

    async def credit(self, groups: Sequence[Group], past: Sequence[StepRecord]) -> list[Credit]:
        scored = [(t, score(t, self.config)) for group in groups for t in group]
        return [Credit.even(trajectory, reward) for trajectory, reward in scored if reward > 0]
