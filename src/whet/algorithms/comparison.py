"""Credit by comparison: what was earned, less what was to be expected.

Statistics are over rollouts: each gives one score to a comparison, whatever its answers and rows.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from whet.algorithms.returns import earn
from whet.config import AlgorithmConfig
from whet.types import Credit, GenerationId, Group

Scores = Sequence[Sequence[float]]
"""Of each rollout of each group of a step."""


class Baseline(NamedTuple):
    """What a score is measured by: the advantage is `(score - shift) / scale`."""

    shift: float
    scale: float = 1.0


Baselines = Sequence[Sequence[Baseline] | None]
"""Of each rollout of each group; None for a group that teaches nothing."""


def compare(
    groups: Sequence[Group], config: AlgorithmConfig, baselines: Callable[[Scores], Baselines]
) -> list[Credit]:
    """Credit every answer by the baselines of the scores it is compared with."""
    earned = [[earn(trajectory, config) for trajectory in group] for group in groups]
    slots = {r.slot for group in earned for one in group for r in one.returns.values()}
    fitted = {
        slot: baselines([[one.at(slot) for one in group] for group in earned])
        for slot in sorted(slots)
    }
    credits: list[Credit] = []
    for place, group in enumerate(earned):
        for index, one in enumerate(group):
            advantages: dict[GenerationId, float] = {}
            for id, (slot, value) in one.returns.items():
                if (of_group := fitted[slot][place]) is not None:
                    shift, scale = of_group[index]
                    advantages[id] = (value - shift) / scale
            if advantages:
                credits.append(Credit(one.trajectory, advantages))
    return credits
