import pytest

from trajectories import Conversation, generation, single
from whet.algorithms.grpo import GRPO
from whet.config import AlgorithmConfig
from whet.types import Trajectory


def group(*rewards: float) -> list[Trajectory]:
    return [single(f"r{index}", [1], [2], reward) for index, reward in enumerate(rewards)]


def advantages(*rewards: float, divide_by_std: bool = False) -> list[float]:
    credits = GRPO(AlgorithmConfig(divide_by_std=divide_by_std)).credit(group(*rewards))
    return [value for credit in credits for value in credit.advantages.values()]


def test_an_advantage_is_the_reward_less_the_groups_mean() -> None:
    assert advantages(1, 0, 0, 0) == [0.75, -0.25, -0.25, -0.25]
    assert advantages(2, 5) == [-1.5, 1.5]


def test_divided_by_the_standard_deviation_if_asked() -> None:
    # The mean of 1, 0, 0, 0 is 1/4, its variance 3/16.
    assert advantages(1, 0, 0, 0, divide_by_std=True) == pytest.approx(
        [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]
    )


@pytest.mark.parametrize("divide_by_std", [False, True])
@pytest.mark.parametrize("rewards", [(), (1.0,), (0.3, 0.3, 0.3)])
def test_a_group_without_signal_is_dropped(rewards: tuple[float, ...], divide_by_std: bool) -> None:
    assert advantages(*rewards, divide_by_std=divide_by_std) == []


def test_every_generation_of_a_trajectory_gets_its_advantage_and_the_mean_is_over_rollouts() -> (
    None
):
    talk = Conversation("long")
    [first] = talk.call([1], generation([2]))
    more = talk.call([3], generation([4]), generation([5]), parent=first)
    long, short = talk.ended(1.0), single("short", [1], [9], 0.0)
    of_long, of_short = GRPO(AlgorithmConfig()).credit([long, short])
    assert of_long.trajectory is long
    assert of_long.advantages == dict.fromkeys([first, *more], 0.5)
    assert list(of_short.advantages.values()) == [-0.5]
