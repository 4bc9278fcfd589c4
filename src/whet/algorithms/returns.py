"""What a trajectory earned, as a whole and at each of its answers.

The answers of an attempt form a forest: one continues another, or begins a conversation. Rewards
for a call or a turn are earned at that answer; those for the attempt or an agent at the end of
every conversation. By `turn` an answer's return is what was earned from it on,

    discount^h * (attempt + agent)  +  sum over answers d below it, and itself, of
                                       discount^(turns between) * rewards of d

with h the most turns that follow it. So without such rewards, and with a discount of 1, every
answer's return is the attempt's reward, which is what it is by `attempt` in any case.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from whet.config import AlgorithmConfig
from whet.errors import ConfigError
from whet.types import Call, GenerationId, Reward, Trajectory

REWARD = "reward"
"""The key of the attempt's own reward."""


class Slot(NamedTuple):
    """Answers that are compared with each other across the rollouts of a group."""

    agent: str = ""
    turn: int = 0


class Return(NamedTuple):
    """What was earned from an answer on."""

    slot: Slot
    value: float


@dataclass(frozen=True, slots=True)
class Earnings:
    """A trajectory and what it earned."""

    trajectory: Trajectory
    whole: float
    """The attempt."""
    agents: Mapping[str, float]
    """Beyond it, each agent that was given something."""
    returns: Mapping[GenerationId, Return]

    def at(self, slot: Slot) -> float:
        """The score of this rollout in a slot: one number, however many answers it has there.

        One that ended before, or without the agent, earned no more: it counts with what it has.
        """
        here = [value for its, value in self.returns.values() if its == slot]
        return fmean(here) if here else self.whole + self.agents.get(slot.agent, 0.0)


def earn(trajectory: Trajectory, config: AlgorithmConfig) -> Earnings:
    """Read the rewards of a trajectory.

    Raises:
        ConfigError: some of them would be read by nobody.
    """
    for reward in trajectory.rewards:
        _refuse_unread(reward, trajectory, config)
    read = [r for r in trajectory.rewards if r.key not in config.logged_keys]
    # The attempt's own reward is the outcome's: what was returned, or the last that was emitted.
    further = sum(r.value for r in read if r.target is None and r.key != REWARD)
    whole = trajectory.reward + further
    if config.credit == "attempt":
        returns = dict.fromkeys(trajectory.generation_ids(), Return(Slot(), whole))
        return Earnings(trajectory, whole, {}, returns)
    return _along_the_tree(trajectory, whole, [r for r in read if r.target], config.discount)


def score(trajectory: Trajectory, config: AlgorithmConfig) -> float:
    """What the attempt earned, for an algorithm that reads nothing else."""
    return earn(trajectory, config).whole


def _refuse_unread(reward: Reward, trajectory: Trajectory, config: AlgorithmConfig) -> None:
    whose = f"rollout {trajectory.attempt.rollout.id!r} has a reward"
    if reward.key not in (REWARD, *config.reward_keys, *config.logged_keys):
        raise ConfigError(
            f"{whose} with key {reward.key!r}, which nobody reads: name it in "
            "algorithm.reward_keys or algorithm.logged_keys"
        )
    if reward.target and reward.key not in config.logged_keys and config.credit == "attempt":
        raise ConfigError(
            f"{whose} for {reward.target}, but only the attempt's is read: set "
            "algorithm.credit to 'turn' with grpo, rloo or reinforce++"
        )


@dataclass(slots=True)
class _Answer:
    """A generation in its place."""

    slot: Slot
    call: Call
    children: list[GenerationId]
    earned: float = 0.0

    def is_meant(self, reward: Reward) -> bool:
        target = reward.target
        assert target is not None
        return (
            target.call in (None, self.call.id)
            and target.turn in (None, self.slot.turn)
            and target.agent in (None, self.slot.agent)
        )


def _along_the_tree(
    trajectory: Trajectory, whole: float, rewards: Sequence[Reward], discount: float
) -> Earnings:
    answers = _answers(trajectory.calls)
    agents = defaultdict[str, float](float)
    for reward in rewards:
        assert reward.target is not None
        meant = [answer for answer in answers.values() if answer.is_meant(reward)]
        if not meant:
            raise ConfigError(
                f"rollout {trajectory.attempt.rollout.id!r} has a reward for {reward.target}, "
                f"but no such answer among its {len(answers)}: mend the agent; to go on, resume "
                f"with --algorithm.logged-keys {reward.key}, and rewards of that key teach nothing"
            )
        if reward.target.call is None and reward.target.turn is None:
            agents[meant[0].slot.agent] += reward.value
        else:
            for answer in meant:
                answer.earned += reward.value
    returns = {
        id: Return(slot, discount**height * (whole + agents.get(slot.agent, 0.0)) + below)
        for id, slot, height, below in _from_the_leaves(answers, discount)
    }
    in_order = {id: returns[id] for id in answers}
    return Earnings(trajectory, whole, agents, in_order)


def _answers(calls: Sequence[Call]) -> dict[GenerationId, _Answer]:
    """Every generation with those that continue it. A call is recorded after its parent."""
    answers: dict[GenerationId, _Answer] = {}
    for call in calls:
        parent = answers.get(call.parent) if call.parent else None
        slot = Slot(call.origin.agent, parent.slot.turn + 1 if parent else 0)
        for index in range(len(call.generations)):
            id = call.generation_id(index)
            answers[id] = _Answer(slot, call, [])
            if parent:
                parent.children.append(id)
    return answers


def _from_the_leaves(
    answers: dict[GenerationId, _Answer], discount: float
) -> Iterator[tuple[GenerationId, Slot, int, float]]:
    """Each answer, how many turns follow it, and what was earned at and below it."""
    seen: dict[GenerationId, tuple[int, float]] = {}
    for id, answer in reversed(answers.items()):
        below = [seen[child] for child in answer.children]
        height = 1 + max((height for height, _ in below), default=-1)
        earned = answer.earned + discount * sum(value for _, value in below)
        seen[id] = height, earned
        yield id, answer.slot, height, earned
