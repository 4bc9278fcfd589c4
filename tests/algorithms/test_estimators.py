"""Every estimator against arithmetic done by hand."""

import pytest

from support.store.steps import advantages, past_of, step_of
from support.store.trajectories import Conversation, generation, single
from whet.algorithms.best_of_n import BestOfN
from whet.algorithms.greedy import GreedyOutputs
from whet.algorithms.grpo import GRPO
from whet.algorithms.positive import PositiveOnly
from whet.algorithms.reinforce import Reinforce
from whet.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from whet.algorithms.rloo import RLOO
from whet.config import AlgorithmConfig
from whet.types import StepRecord

pytestmark = pytest.mark.anyio

CONFIG = AlgorithmConfig()


async def test_grpo_subtracts_the_groups_mean() -> None:
    # Means: 1/4 and 7/2.
    assert await advantages(GRPO(CONFIG), [(1, 0, 0, 0), (2, 5)]) == [
        [0.75, -0.25, -0.25, -0.25],
        [-1.5, 1.5],
    ]


async def test_grpo_divides_by_the_standard_deviation_if_asked() -> None:
    # The mean of 1, 0, 0, 0 is 1/4; its variance is (9 + 1 + 1 + 1) / 16 over 3, which is 1/4.
    algorithm = GRPO(AlgorithmConfig(divide_by_std=True))
    [found] = await advantages(algorithm, [(1, 0, 0, 0)])
    assert found == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


@pytest.mark.parametrize("divide_by_std", [False, True])
async def test_grpo_drops_groups_without_signal(divide_by_std: bool) -> None:
    algorithm = GRPO(AlgorithmConfig(divide_by_std=divide_by_std))
    found = await advantages(algorithm, [(), (1,), (0.3, 0.3, 0.3), (0, 1)])
    assert [len(group) for group in found] == [0, 0, 0, 2]


async def test_scores_that_differ_by_rounding_are_no_signal_of_size() -> None:
    algorithm = GRPO(AlgorithmConfig(divide_by_std=True))
    [found] = await advantages(algorithm, [(0.1 + 0.2, 0.3, 0.3)])
    assert all(abs(value) < 1e-9 for value in found)


async def test_rloo_subtracts_the_mean_of_the_others() -> None:
    # 1 - (0 + 2) / 2, 0 - (1 + 2) / 2, 2 - (1 + 0) / 2.
    assert await advantages(RLOO(CONFIG), [(1, 0, 2), (4, 4)]) == [[0.0, -1.5, 1.5], []]


async def test_reinforce_subtracts_the_running_mean_of_earlier_steps() -> None:
    algorithm = Reinforce(AlgorithmConfig(baseline_decay=0.75))
    # 0.25, then 0.75 * 0.25 + 0.25 * 1.25 = 0.5; the step in which all failed says nothing.
    found = await advantages(algorithm, [(1.0,), (0.25,), (0.5,)], past_of(0.25, None, 1.25))
    assert found == [[0.5], [-0.25], []]


async def test_reinforce_compares_its_first_step_with_itself() -> None:
    found = await advantages(Reinforce(CONFIG), [(1.0, 0.0), (0.5,)])
    assert found == [[0.5, -0.5], []]
    assert await advantages(Reinforce(CONFIG), [(), ()]) == [[], []]


async def test_reinforce_plus_plus_normalizes_over_the_step() -> None:
    # 1, 1, 0, 2: the mean is 1, the variance (0 + 0 + 1 + 1) / 3.
    found = await advantages(ReinforcePlusPlus(CONFIG), [(1, 1), (0, 2)])
    assert found == [[0, 0], pytest.approx([-(1.5**0.5), 1.5**0.5], rel=1e-5)]
    assert await advantages(ReinforcePlusPlus(CONFIG), [(1, 1), (1, 1)]) == [[], []]


async def test_reinforce_plus_plus_subtracts_the_groups_mean_first_if_asked() -> None:
    # What remains is 0, 0, -1, 1, of mean 0 and variance 2/3; the first group is silent.
    algorithm = ReinforcePlusPlus(AlgorithmConfig(group_baseline=True))
    found = await advantages(algorithm, [(3, 3), (0, 2)])
    assert found == [[], pytest.approx([-(1.5**0.5), 1.5**0.5], rel=1e-5)]


async def test_positive_only_is_the_reward_where_it_is_above_zero() -> None:
    found = await advantages(PositiveOnly(CONFIG), [(1, 0, -1, 0.5), (0, 0)])
    assert found == [[1, 0.5], []]


async def test_greedy_reinforces_what_is_right() -> None:
    assert await advantages(GreedyOutputs(CONFIG), [(1,), (0.9,), (2,)]) == [[1], [], [1]]
    easy = GreedyOutputs(AlgorithmConfig(success_threshold=0.5))
    assert await advantages(easy, [(1,), (0.9,), (0.4,)]) == [[1], [1], []]


async def test_best_of_n_takes_the_first_of_the_best() -> None:
    groups = step_of([(0, 2, 2), (1, 1), (-1, -2)])
    credits = await BestOfN(CONFIG).credit(groups, [])
    assert [c.trajectory for c in credits] == [groups[0][1], groups[2][0]]
    assert [list(c.advantages.values()) for c in credits] == [[1.0], [1.0]]


async def test_every_answer_of_a_rollout_gets_its_advantage_and_the_mean_is_over_rollouts() -> None:
    talk = Conversation("long")
    [first] = talk.call([1], generation([2]))
    more = talk.call([3], generation([4]), generation([5]), parent=first)
    long, short = talk.ended(1.0), single("short", [1], [9], 0.0)
    of_long, of_short = await GRPO(CONFIG).credit([[long, short]], [])
    assert of_long.trajectory is long
    assert of_long.advantages == dict.fromkeys([first, *more], 0.5)
    assert list(of_short.advantages.values()) == [-0.5]


@pytest.mark.parametrize("algorithm", [GRPO, RLOO, ReinforcePlusPlus, BestOfN])
async def test_rewards_that_differ_by_rounding_alone_are_no_signal(
    algorithm: type[GRPO | RLOO | ReinforcePlusPlus | BestOfN],
) -> None:
    assert await advantages(algorithm(CONFIG), [(0.1 + 0.2, 0.3)]) == [[]]


async def test_a_reward_key_added_on_resume_counts_as_zero_in_earlier_steps() -> None:
    config = AlgorithmConfig(reward_keys=("bonus",))
    metrics = {"rollouts": 2.0, "failed_rollouts": 0.0, "reward": 0.5}
    past = [StepRecord(step=0, version=1, checkpoint="c", consumed=(), metrics=metrics)]
    credits = await Reinforce(config).credit(step_of([(1.0, 0.0)]), past)
    assert [list(credit.advantages.values()) for credit in credits] == [[0.5], [-0.5]]
