"""Rewards of turns, calls and agents, and the return of each answer."""

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.store.trajectories import Conversation, generation, single
from whet.algorithms import explain_unread_reward
from whet.algorithms.grpo import GRPO
from whet.algorithms.returns import TurnKey, compute_returns
from whet.algorithms.rloo import RLOO
from whet.config import AlgorithmConfig
from whet.types import CallId, GenerationId, Origin, Reward, Target, Trajectory

pytestmark = pytest.mark.anyio

BY_TURN = AlgorithmConfig(credit="turn")


def talk_of(turns: int, rollout: str = "r") -> tuple[Conversation, list[GenerationId]]:
    """A conversation of so many answers, one after the other."""
    talk = Conversation(rollout)
    ids: list[GenerationId] = []
    for turn in range(turns):
        ids += talk.call([turn], generation([9]), parent=ids[-1] if ids else None)
    return talk, ids


def rewarded(talk: Conversation, reward: float, *rewards: Reward) -> Trajectory:
    return talk.ended(reward).model_copy(update={"rewards": rewards})


def at_turn(value: float, turn: int) -> Reward:
    return Reward(value=value, target=Target(turn=turn))


def values(trajectory: Trajectory, config: AlgorithmConfig) -> list[float]:
    return [value for _, value in compute_returns(trajectory, config).returns.values()]


def test_an_answer_earns_what_comes_from_it_on_less_by_turns() -> None:
    talk, _ = talk_of(3)
    config = AlgorithmConfig(credit="turn", discount=0.5)
    # Turn 0: 1 + 0.5 * 0 + 0.25 * 4, and the attempt's 8 two turns on; turn 1: 0.5 * 4 + 0.5 * 8.
    found = values(rewarded(talk, 8.0, at_turn(1, 0), at_turn(4, 2)), config)
    assert found == [1 + 0.25 * 4 + 0.25 * 8, 0.5 * 4 + 0.5 * 8, 4 + 8]


def test_what_was_earned_before_an_answer_is_not_its_own() -> None:
    talk, _ = talk_of(2)
    assert values(rewarded(talk, 0.0, at_turn(5, 0)), BY_TURN) == [5, 0]


def test_branches_earn_for_what_they_grow_from() -> None:
    talk = Conversation()
    [root] = talk.call([1], generation([2]))
    [left] = talk.call([3], generation([4]), parent=root)
    [right] = talk.call([5], generation([6]), parent=root)
    [leaf] = talk.call([7], generation([8]), parent=right)
    for_left = Reward(value=1, target=Target(call=talk.calls[1].id))
    for_leaf = Reward(value=10, target=Target(call=talk.calls[3].id))
    found = compute_returns(
        rewarded(talk, 100.0, for_left, for_leaf), AlgorithmConfig(credit="turn", discount=0.5)
    ).returns
    assert {id: value for id, (_, value) in found.items()} == {
        root: 0.5 * 1 + 0.25 * 10 + 0.25 * 100,  # two turns follow it at the most
        left: 1 + 100,
        right: 0.5 * 10 + 0.5 * 100,
        leaf: 10 + 100,
    }


def test_an_agents_reward_is_for_all_its_answers_and_no_others() -> None:
    talk = Conversation()
    talk.call([1], generation([2]))
    talk.call([3], generation([4]))
    first, second = talk.calls
    talk.calls[1] = second.model_copy(update={"origin": Origin(agent="critic")})
    reward = Reward(value=3, target=Target(agent="critic"))
    found = compute_returns(rewarded(talk, 1.0, reward), BY_TURN).returns
    assert found == {
        first.generation_id(0): (TurnKey("", 0), 1),
        second.generation_id(0): (TurnKey("critic", 0), 4),
    }


async def test_turns_are_compared_with_the_same_turn_of_the_other_rollouts() -> None:
    long, (first, second) = talk_of(2, "long")
    short, (only,) = talk_of(1, "short")
    group = [rewarded(long, 0.0, at_turn(4, 0), at_turn(2, 1)), rewarded(short, 1.0, at_turn(1, 0))]
    # Turn 0: 6 and 2, mean 4. Turn 1: 2, and 1 for the one that ended before: mean 1.5.
    of_long, of_short = await GRPO(BY_TURN).credit([group], [])
    assert of_long.advantages == {first: 2.0, second: 0.5}
    assert of_short.advantages == {only: -2.0}
    of_long, of_short = await RLOO(BY_TURN).credit([group], [])
    assert of_long.advantages == {first: 4.0, second: 1.0}


rewards = st.integers(-8, 8).map(float)


@given(st.lists(st.tuples(st.integers(1, 4), rewards), min_size=2, max_size=5))
def test_without_rewards_for_parts_credit_by_turn_is_credit_by_attempt(
    rollouts: list[tuple[int, float]],
) -> None:
    group = [talk_of(turns, f"r{i}")[0].ended(r) for i, (turns, r) in enumerate(rollouts)]
    by_attempt = anyio.run(GRPO(AlgorithmConfig()).credit, [group], ())
    assert anyio.run(GRPO(BY_TURN).credit, [group], ()) == by_attempt


def test_further_keys_are_added_and_logged_ones_are_not() -> None:
    emitted = (Reward(value=9), Reward(value=0.5, key="style"), Reward(value=7, key="length"))
    config = AlgorithmConfig(reward_keys=("style",), logged_keys=("length",))
    talk, _ = talk_of(1)
    # The reward itself is the outcome's, whatever was emitted on the way.
    assert compute_returns(rewarded(talk, 1.0, *emitted), config).whole == 1.5


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (Reward(value=1, key="style"), "unknown key 'style'"),
        (at_turn(1, 0), "it is for turn 0, but only the attempt's is read"),
    ],
)
def test_a_reward_that_nobody_reads_is_left_out_with_the_reason(
    reward: Reward, reason: str
) -> None:
    talk, _ = talk_of(2)
    config = AlgorithmConfig()
    assert compute_returns(rewarded(talk, 0.5, reward), config).whole == 0.5
    assert explain_unread_reward(reward, [config]).startswith(reason)


def test_a_reward_is_read_if_one_of_several_algorithms_or_a_custom_one_may_read_it() -> None:
    reward, plain = Reward(value=1, key="style"), AlgorithmConfig()
    for other in (AlgorithmConfig(logged_keys=("style",)), AlgorithmConfig(name="mine.py:Mine")):
        assert not explain_unread_reward(reward, [plain, other])
    assert not explain_unread_reward(reward, [])


@pytest.mark.parametrize(
    ("reward", "target"),
    [
        (at_turn(5, 9), "turn 9"),
        (Reward(value=5, target=Target(call=CallId("gone"), agent="x")), "call 'gone', agent 'x'"),
    ],
)
async def test_a_reward_for_what_was_not_reached_counts_for_nothing(
    reward: Reward, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    talk, _ = talk_of(2, "short")
    group = [rewarded(talk, 1.0, reward), single("other", [1], [2], 0.0)]
    of_short, _ = await GRPO(BY_TURN).credit([group], [])
    assert set(of_short.advantages.values()) == {0.5}
    assert f"reward without a generation rollout=short target={target}" in caplog.text
