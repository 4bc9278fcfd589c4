"""Group relative policy optimisation."""

from statistics import fmean, pstdev

from whet.config import AlgorithmConfig
from whet.protocols import Algorithm
from whet.types import Credit, Group


class GRPO(Algorithm):
    """Advantage is reward minus the group's mean (arXiv:2402.03300).

    Not divided by the standard deviation unless asked: that weights a task by how often it is
    solved (arXiv:2503.20783). A group whose rewards are all equal teaches nothing and is dropped,
    so no forward pass is spent on it. The mean is over rollouts, whatever their rows.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config

    def credit(self, group: Group) -> list[Credit]:
        rewards = [trajectory.reward for trajectory in group]
        if len(set(rewards)) < 2:
            return []
        mean = fmean(rewards)
        scale = pstdev(rewards) if self._config.divide_by_std else 1.0
        return [
            Credit(
                trajectory,
                {
                    call.generation_id(index): (trajectory.reward - mean) / scale
                    for call in trajectory.calls
                    for index in range(len(call.generations))
                },
            )
            for trajectory in group
        ]
