"""Discounted returns of a trajectory, as a whole and at each of its generations.

The generations of an attempt form a forest: one continues another or starts a conversation. A
reward for a call or a turn is received at that generation; one for the attempt or an agent at the
end of every conversation. With `credit = "turn"` the return of a generation is

    discount^h * (attempt + agent)  +  sum over generations d in its subtree of
                                       discount^(turns between) * rewards of d

with h the height of its subtree. Without such rewards and with a discount of 1 this is the
attempt's reward, which is the return of every generation with `credit = "attempt"`.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from whet.config import AlgorithmConfig
from whet.types import LENGTH_PENALTY, Call, GenerationId, Reward, Trajectory

logger = logging.getLogger(__name__)


class TurnKey(NamedTuple):
    """Generations that are compared with each other across the rollouts of a group."""

    agent: str = ""
    turn: int = 0


class Return(NamedTuple):
    """Return of a generation."""

    key: TurnKey
    value: float


@dataclass(frozen=True, slots=True)
class Returns:
    """A trajectory with its returns."""

    trajectory: Trajectory
    whole: float
    """Return of the attempt."""
    agents: Mapping[str, float]
    """Further rewards by agent."""
    returns: Mapping[GenerationId, Return]
    turns: Mapping[TurnKey, float]
    """Mean return of the generations of each turn."""

    def get_score(self, turn: TurnKey) -> float:
        """Return the score of this rollout at a turn: one number, however many generations it has.

        A rollout that ended earlier, or without the agent, counts with the return it has.
        """
        mean = self.turns.get(turn)
        return self.whole + self.agents.get(turn.agent, 0.0) if mean is None else mean


def compute_returns(trajectory: Trajectory, config: AlgorithmConfig) -> Returns:
    """Compute the returns of a trajectory from those of its rewards that are read."""
    logged = config.logged_keys
    read = [
        reward
        for reward in trajectory.rewards
        if not (reward.key in logged or reward.is_of_judge or explain_unread(reward, config))
    ]
    # The attempt's own reward is the outcome's: what was returned, or the last that was emitted.
    further = sum(r.value for r in read if r.target is None and not r.is_own)
    whole = trajectory.reward + further
    if config.credit == "attempt":
        returns = dict.fromkeys(trajectory.generation_ids(), Return(TurnKey(), whole))
        return Returns(trajectory, whole, {}, returns, _average_by_turn(returns))
    return _compute_turn_returns(trajectory, whole, [r for r in read if r.target], config.discount)


def score(trajectory: Trajectory, config: AlgorithmConfig) -> float:
    """Return the attempt's return, for algorithms that use nothing else."""
    return compute_returns(trajectory, config).whole


def explain_unread(reward: Reward, config: AlgorithmConfig) -> str:
    """Return why the built-in algorithms do not read a reward; empty if they do."""
    if reward.is_of_judge or reward.key in config.logged_keys:
        return ""
    if reward.key not in ("reward", LENGTH_PENALTY, *config.reward_keys):
        return (
            f"unknown key {reward.key!r}: name it in algorithm.reward_keys or algorithm.logged_keys"
        )
    if reward.target and config.credit == "attempt":
        return (
            f"it is for {reward.target}, but only the attempt's is read: set algorithm.credit "
            "to 'turn' with grpo, rloo or reinforce++"
        )
    return ""


@dataclass(slots=True)
class _Node:
    """A generation in the forest, with the rewards received at it."""

    key: TurnKey
    call: Call
    children: list[GenerationId]
    reward: float = 0.0

    def matches(self, reward: Reward) -> bool:
        target = reward.target
        assert target is not None
        return (
            target.call in (None, self.call.id)
            and target.turn in (None, self.key.turn)
            and target.agent in (None, self.key.agent)
        )


def _compute_turn_returns(
    trajectory: Trajectory, whole: float, rewards: Sequence[Reward], discount: float
) -> Returns:
    nodes = _build_forest(trajectory.calls)
    agents = defaultdict[str, float](float)
    for reward in rewards:
        assert reward.target is not None
        targets = [node for node in nodes.values() if node.matches(reward)]
        if not targets:
            # Whether a rollout reaches a turn or an agent acts depends on the policy, and what
            # agents of other processes post is not ours.
            logger.warning(
                "reward without a generation rollout=%s target=%s",
                trajectory.attempt.rollout.id,
                reward.target,
            )
            continue
        if reward.target.call is None and reward.target.turn is None:
            agents[targets[0].key.agent] += reward.value
        else:
            for node in targets:
                node.reward += reward.value
    returns = {
        id: Return(key, discount**height * (whole + agents.get(key.agent, 0.0)) + below)
        for id, key, height, below in _accumulate(nodes, discount)
    }
    in_order = {id: returns[id] for id in nodes}
    return Returns(trajectory, whole, agents, in_order, _average_by_turn(in_order))


def _average_by_turn(returns: Mapping[GenerationId, Return]) -> dict[TurnKey, float]:
    values = defaultdict[TurnKey, list[float]](list)
    for key, value in returns.values():
        values[key].append(value)
    return {key: fmean(found) for key, found in values.items()}


def _build_forest(calls: Sequence[Call]) -> dict[GenerationId, _Node]:
    """Map every generation to its node. A call is recorded after its parent."""
    nodes: dict[GenerationId, _Node] = {}
    for call in calls:
        parent = nodes.get(call.parent) if call.parent else None
        key = TurnKey(call.origin.agent, parent.key.turn + 1 if parent else 0)
        for id in call.generations_by_id:
            nodes[id] = _Node(key, call, [])
            if parent:
                parent.children.append(id)
    return nodes


def _accumulate(
    nodes: dict[GenerationId, _Node], discount: float
) -> Iterator[tuple[GenerationId, TurnKey, int, float]]:
    """Yield each generation with the height and the discounted rewards of its subtree."""
    seen: dict[GenerationId, tuple[int, float]] = {}
    for id, node in reversed(nodes.items()):
        below = [seen[child] for child in node.children]
        height = 1 + max((height for height, _ in below), default=-1)
        received = node.reward + discount * sum(value for _, value in below)
        seen[id] = height, received
        yield id, node.key, height, received
