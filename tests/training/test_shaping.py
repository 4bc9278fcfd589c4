"""Penalties on long answers, masks of truncated ones, and rewards of failures reach the credit."""

import pytest

from support.store.trajectories import Conversation, generation
from whet.algorithms import BY_NAME
from whet.algorithms.grpo import GRPO
from whet.algorithms.reinforce import Reinforce
from whet.algorithms.returns import score
from whet.config import AlgorithmConfig, LengthConfig, RunConfig
from whet.trainers.fake import FakeTrainer
from whet.training.shaping import add_length_penalties, mask_truncated
from whet.training.step import StepBatch, Stopwatch, update_policy
from whet.types import (
    Credit,
    Failure,
    FailureKind,
    Generation,
    GenerationId,
    StepRecord,
    Trajectory,
)

pytestmark = pytest.mark.anyio

DAPO = LengthConfig(soft_limit=16, hard_limit=20)


def answer(tokens: int, *, truncated: bool = False) -> Generation:
    made = generation(range(tokens))
    return made.model_copy(update={"stop": "length"}) if truncated else made


def talk(name: str, *answers: Generation) -> tuple[Conversation, list[GenerationId]]:
    conversation, ids = Conversation(name), list[GenerationId]()
    for each in answers:
        ids += conversation.call([1], each, parent=ids[-1] if ids else None)
    return conversation, ids


@pytest.mark.parametrize(
    ("tokens", "cost"), [(3, 0.0), (16, 0.0), (17, 0.25), (19, 0.75), (20, 1.0), (100, 1.0)]
)
def test_the_penalty_rises_between_the_limits_as_in_dapo(tokens: int, cost: float) -> None:
    # DAPO (arXiv:2503.14476), equation 13: ((L_max - L_cache) - |y|) / L_cache, here L_cache = 4.
    assert DAPO.compute_cost(tokens) == cost
    assert LengthConfig(soft_limit=16, hard_limit=20, penalty=0.5).compute_cost(tokens) == cost / 2
    assert LengthConfig(token_cost=0.01).compute_cost(tokens) == pytest.approx(0.01 * tokens)


async def test_a_penalty_by_attempt_is_the_sum_over_its_answers() -> None:
    config = RunConfig(length=DAPO)
    long, _ = talk("long", answer(18), answer(20))
    short, _ = talk("short", answer(4))
    [group] = add_length_penalties([[long.ended(1.0), short.ended(1.0)]], config)
    assert [score(each, config.algorithm) for each in group] == [-0.5, 1.0]
    assert [each.reward for each in group] == [1.0, 1.0], "the agent's own reward stays"
    first, second = await GRPO(config.algorithm).credit([group], [])
    assert set(first.advantages.values()) == {-0.75}
    assert set(second.advantages.values()) == {0.75}


async def test_a_penalty_by_turn_does_not_reach_later_answers() -> None:
    config = RunConfig(length=DAPO, algorithm=AlgorithmConfig(credit="turn"))
    early, (first, second) = talk("early", answer(20), answer(4))
    other, (third, fourth) = talk("other", answer(4), answer(18))
    [group] = add_length_penalties([[early.ended(1.0), other.ended(1.0)]], config)
    one, two = await GRPO(config.algorithm).credit([group], [])
    # Returns: (1 - 1, 1) and (1 - 0.5, 1 - 0.5).
    assert one.advantages == {first: -0.25, second: 0.25}
    assert two.advantages == {third: 0.25, fourth: -0.25}


async def test_the_running_mean_of_reinforce_includes_penalties() -> None:
    metrics = {"reward": 1.0, "reward/length_penalty": -0.5, "rollouts": 2, "failed_rollouts": 0}
    past = StepRecord(step=0, version=1, checkpoint="c", consumed=(), metrics=metrics)
    config = RunConfig(length=DAPO, algorithm=AlgorithmConfig(name="reinforce"))
    long, _ = talk("long", answer(20))
    [group] = add_length_penalties([[long.ended(1.0)]], config)
    [credit] = await Reinforce(config.algorithm).credit([group], [past])
    assert list(credit.advantages.values()) == [-0.5]


def failed_trajectory(name: str, reward: float) -> Trajectory:
    conversation, _ = talk(name, answer(2))
    failure = Failure(kind=FailureKind.TIMEOUT, message="too late")
    return conversation.ended(reward).model_copy(update={"failure": failure})


@pytest.mark.parametrize("by", ["attempt", "turn"])
@pytest.mark.parametrize("name", sorted(BY_NAME))
async def test_every_algorithm_reads_the_reward_of_a_failure(name: str, by: str) -> None:
    if by == "turn" and name not in ("grpo", "rloo", "reinforce++"):
        pytest.skip("it has no credit by turn")
    config = AlgorithmConfig.model_validate({"name": name, "credit": by})
    right, _ = talk("right", answer(2), answer(2))
    group = [failed_trajectory("failed", -1.0), right.ended(1.0)]
    credits = await BY_NAME[name](config).credit([group], [])
    advantages = {
        credit.trajectory.attempt.rollout.id: [float(str(a)) for a in credit.advantages.values()]
        for credit in credits
    }
    assert all(value > 0 for value in advantages["right"])
    if name in ("positive", "greedy", "best_of_n"):
        assert "failed" not in advantages
    else:
        assert all(value < 0 for value in advantages["failed"])


def test_truncated_answers_are_masked_or_their_whole_rollout() -> None:
    cut, (first, second) = talk("cut", answer(4), answer(4, truncated=True))
    whole, (third,) = talk("whole", answer(4))
    credits = [Credit.even(cut.ended(1.0), 1.0), Credit.even(whole.ended(0.0), -1.0)]

    def kept(mode: str) -> list[set[GenerationId]]:
        config = LengthConfig.model_validate({"truncated": mode})
        return [set(credit.advantages) for credit in mask_truncated(credits, config)]

    assert kept("train") == [{first, second}, {third}]
    assert kept("mask") == [{first}, {third}]
    assert kept("mask_rollout") == [set(), {third}]


async def test_a_step_whose_answers_were_all_cut_off_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cut = [talk(name, answer(4, truncated=True))[0].ended(1.0) for name in ("a", "b")]
    batch = StepBatch(
        rollouts=tuple(each.attempt.rollout for each in cut),
        groups=(cut,),
        credits=tuple(Credit.even(each, 1.0) for each in cut),
        zero_signal=(),
    )
    config = RunConfig(length=LengthConfig(truncated="mask"))
    metrics = await update_policy(batch, [], config, Stopwatch(), FakeTrainer())
    assert (metrics["rows"], metrics["masked_generations"]) == (0, 2)
    assert "step 1 trained nothing: 2 x an answer was cut off" in caplog.text
