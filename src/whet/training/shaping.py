"""Penalties on the length of answers, and masks of truncated ones."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from whet.config import LengthConfig, RunConfig
from whet.types import LENGTH_PENALTY, Credit, GenerationId, Group, Reward, Target, Trajectory


def add_length_penalties(groups: Sequence[Group], config: RunConfig) -> list[Group]:
    """Return the groups with a negative reward for the length of answers, as `config.length` has.

    With `credit = "turn"` each answer has its own; otherwise the attempt has their sum.
    """
    if not config.length.is_active:
        return list(groups)
    by_turn = config.algorithm.credit == "turn"
    return [
        [_apply_penalty(trajectory, config.length, by_turn) for trajectory in g] for g in groups
    ]


def mask_truncated(credits: Sequence[Credit], config: LengthConfig) -> list[Credit]:
    """Return the credits without truncated generations, or without their rollouts."""
    if config.truncated == "train":
        return list(credits)
    kept: list[Credit] = []
    for credit in credits:
        truncated = find_truncated(credit.trajectory) & set(credit.advantages)
        if truncated and config.truncated == "mask_rollout":
            truncated = set(credit.advantages)
        left = {id: value for id, value in credit.advantages.items() if id not in truncated}
        kept.append(replace(credit, advantages=left))
    return kept


def find_truncated(trajectory: Trajectory) -> set[GenerationId]:
    """Return the generations that were cut off at `max_tokens` or the end of the context."""
    return {
        id
        for call in trajectory.calls
        for id, generation in call.generations_by_id.items()
        if generation.stop == "length"
    }


def _apply_penalty(trajectory: Trajectory, config: LengthConfig, by_turn: bool) -> Trajectory:
    costs = {
        call.id: fmean(
            config.compute_cost(len(generation.tokens)) for generation in call.generations
        )
        for call in trajectory.calls
        if call.generations
    }
    if by_turn:
        found = [
            Reward(value=-cost, key=LENGTH_PENALTY, target=Target(call=call))
            for call, cost in costs.items()
            if cost
        ]
    else:
        found = [Reward(value=-sum(costs.values()), key=LENGTH_PENALTY)]
    return trajectory.model_copy(update={"rewards": (*trajectory.rewards, *found)})
