"""A custom algorithm: a rollout's advantage is its reward minus the median of its group."""

from collections.abc import Sequence
from statistics import median

import whet
from whet.demos import arithmetic, problems


class AboveMedian:
    """Advantage over the group's median: one lucky rollout does not penalize the others."""

    async def credit(
        self, groups: Sequence[whet.Group], past: Sequence[whet.StepRecord]
    ) -> list[whet.Credit]:
        """Credit the rollouts of a step; a group without credit has no signal."""
        credits: list[whet.Credit] = []
        for group in groups:
            rewards = [trajectory.reward for trajectory in group]
            if len(set(rewards)) > 1:
                middle = median(rewards)
                credits += [whet.Credit.even(t, t.reward - middle) for t in group]
        return credits


if __name__ == "__main__":
    whet.train(
        arithmetic.solve,
        [*problems.problems("train", 200, 0)],
        algorithm=AboveMedian(),
        steps=4,
        trainer={"weights": "full"},
        adam={"lr": 3e-4},
    )
