"""Steps of one-answer rollouts, and the credit an algorithm gives them."""

from collections.abc import Sequence

from support.store.trajectories import Conversation, generation
from whet.protocols import Algorithm
from whet.types import Credit, StepRecord, Trajectory


def step_of(rewards: Sequence[Sequence[float]]) -> list[list[Trajectory]]:
    """Groups whose rollouts earned these."""
    groups: list[list[Trajectory]] = []
    for place, group in enumerate(rewards):
        groups.append([])
        for index, reward in enumerate(group):
            talk = Conversation(f"g{place}-{index}", f"g{place}")
            talk.call([1], generation([2, 3]))
            groups[-1].append(talk.ended(reward))
    return groups


async def advantages(
    algorithm: Algorithm, rewards: Sequence[Sequence[float]], past: Sequence[StepRecord] = ()
) -> list[list[float]]:
    """By group: the advantage of each rollout that got one."""
    credits = await algorithm.credit(step_of(rewards), past)
    return [
        [value for credit in credits if of_group(credit) == f"g{place}" for value in even(credit)]
        for place in range(len(rewards))
    ]


def of_group(credit: Credit) -> str:
    return credit.trajectory.attempt.rollout.group


def even(credit: Credit) -> list[float]:
    """The values of a credit of whole generations."""
    values = list(credit.advantages.values())
    assert not any(isinstance(value, tuple) for value in values)
    return [value for value in values if isinstance(value, float)]


def past_of(*rewards: float | None) -> list[StepRecord]:
    """Steps of four rollouts with these mean rewards; None is a step in which all failed."""
    return [
        StepRecord(
            step=number,
            version=number + 1,
            checkpoint="",
            consumed=(),
            metrics={} if reward is None else {"reward": reward},
        )
        for number, reward in enumerate(rewards)
    ]
