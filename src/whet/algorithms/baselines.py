"""Advantages from baselines: return minus baseline, divided by a scale.

Statistics are over rollouts: each contributes one score, however many generations or rows it has.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from whet.algorithms.returns import compute_returns
from whet.config import AlgorithmConfig
from whet.types import Credit, GenerationId, Group

GroupScores = Sequence[Sequence[float]]
"""Scores of each rollout of each group of a step."""


TOLERANCE = 1e-9
"""Scores that differ by less, relative to their size, differ by rounding."""


class Baseline(NamedTuple):
    """Baseline of a score: the advantage is `(score - shift) / scale`."""

    shift: float
    scale: float = 1.0


Baselines = Sequence[Sequence[Baseline] | None]
"""Baselines of each rollout of each group; None for a group without a learning signal."""


def has_signal(scores: Sequence[float]) -> bool:
    """Return whether scores differ by more than rounding."""
    if not scores:
        return False
    low, high = min(scores), max(scores)
    return high - low > TOLERANCE * max(1.0, abs(low), abs(high))


def compare(
    groups: Sequence[Group], config: AlgorithmConfig, baselines: Callable[[GroupScores], Baselines]
) -> list[Credit]:
    """Compute the advantages of every generation against the baselines of its turn."""
    returns = [[compute_returns(trajectory, config) for trajectory in group] for group in groups]
    turns = {r.key for group in returns for one in group for r in one.returns.values()}
    fitted = {
        turn: baselines([[one.get_score(turn) for one in group] for group in returns])
        for turn in sorted(turns)
    }
    credits: list[Credit] = []
    for number, group in enumerate(returns):
        for index, one in enumerate(group):
            advantages: dict[GenerationId, float] = {}
            for id, (turn, value) in one.returns.items():
                if (group_baselines := fitted[turn][number]) is not None:
                    shift, scale = group_baselines[index]
                    advantages[id] = (value - shift) / scale
            if advantages:
                credits.append(Credit(one.trajectory, advantages))
    return credits
