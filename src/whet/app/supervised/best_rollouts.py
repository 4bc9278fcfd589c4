"""Examples from the rollouts of a run: the best of each group, or pairs of best and worst."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from statistics import fmean

from whet.config import SelectionConfig
from whet.errors import ConfigError
from whet.io.paging import iterate_pages
from whet.protocols import Store
from whet.training.rows import build_rows
from whet.training.selection import select
from whet.training.supervised import SupervisedExample
from whet.types import Credit, Group, Mode, Row, Status, Trajectory


async def read_best(
    store: Store, selection: SelectionConfig, *, min_reward: float | None, best: int | None
) -> list[SupervisedExample]:
    """Make the best rollouts of a run's training groups examples to imitate.

    At most the `best` of each group. With `min_reward` those that reach it; without, those above
    their group's mean: the best of equals is nothing to imitate.
    """

    def choose(group: Group) -> list[SupervisedExample]:
        rewards = [trajectory.reward for trajectory in group]
        # Of equal rewards the mean may be rounded to less than each.
        minimum = max(fmean(rewards), min(rewards)) if min_reward is None else min_reward
        ranked = sorted(group, key=lambda trajectory: -trajectory.reward)
        chosen = [t for t in ranked if t.reward > minimum or t.reward == min_reward]
        found = [(t, _build_rows(t, selection)) for t in chosen[:best]]
        return [SupervisedExample(t.attempt.rollout.id, rows) for t, rows in found if rows]

    return await _read(store, choose)


async def read_pairs(
    store: Store, selection: SelectionConfig, *, min_margin: float
) -> list[SupervisedExample]:
    """Make the best and the worst rollout of each training group a preference pair.

    Groups whose rewards differ by less than `min_margin`, or not at all, are left out.
    """

    def choose(group: Group) -> list[SupervisedExample]:
        ranked = sorted(group, key=lambda trajectory: trajectory.reward)
        worst, best = ranked[0], ranked[-1]
        margin = best.reward - worst.reward
        if margin <= 0 or margin < min_margin:
            return []
        rows, rejected = _build_rows(best, selection), _build_rows(worst, selection)
        return (
            [SupervisedExample(best.attempt.rollout.group, rows, rejected)]
            if rows and rejected
            else []
        )

    return await _read(store, choose)


async def _read(
    store: Store, choose: Callable[[Group], list[SupervisedExample]]
) -> list[SupervisedExample]:
    groups = 0
    examples: list[SupervisedExample] = []
    async for group in _read_groups(store):
        groups += 1
        examples += choose(group)
    if not examples:
        raise ConfigError(
            f"none of the run's {groups} groups of training rollouts has one to train on: rewards "
            "are equal within each group, or below the limit"
        )
    return examples


async def _read_groups(store: Store) -> AsyncGenerator[list[Trajectory]]:
    """Yield the succeeded training rollouts of each group; evaluations are not trained on."""
    ids: dict[str, list[str]] = {}
    async for page in iterate_pages(store, mode=Mode.TRAIN, status=Status.SUCCEEDED):
        for record in page:
            ids.setdefault(record.rollout.group, []).append(record.rollout.id)
    for group in ids.values():
        if trajectories := await store.trajectories(group):
            yield trajectories


def _build_rows(trajectory: Trajectory, selection: SelectionConfig) -> tuple[Row, ...]:
    """The rows of a trajectory as they were sampled, to be trained at temperature 1."""
    built = build_rows(select([Credit.even(trajectory, 1.0)], selection))
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    return tuple(
        replace(row, segments=tuple(replace(s, **plain) for s in row.segments))
        for row in built.rows
    )
