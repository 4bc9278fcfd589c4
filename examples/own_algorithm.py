"""An algorithm of your own: credit is what a rollout earned beyond the middle of its group."""

from collections.abc import Sequence
from statistics import median

import whet
from whet.demos import arithmetic, problems
from whet.types import Credit, Group, StepRecord


class AboveTheMiddle:
    """Advantage is reward minus the group's median: one lucky rollout does not blame the rest."""

    async def credit(self, groups: Sequence[Group], past: Sequence[StepRecord]) -> list[Credit]:
        """What each rollout of a step is worth; a group without credit counts as silent."""
        credits: list[Credit] = []
        for group in groups:
            rewards = [trajectory.reward for trajectory in group]
            if len(set(rewards)) > 1:
                middle = median(rewards)
                credits += [Credit.even(t, t.reward - middle) for t in group]
        return credits


if __name__ == "__main__":
    whet.train(
        arithmetic.solve,
        [*problems.problems("train", 200, 0)],
        algorithm=AboveTheMiddle(),
        steps=4,
        trainer={"weights": "full"},
        adam={"lr": 3e-4},
    )
