"""Every group without a learning signal has a likely cause, and the cause has an explanation."""

import re
from collections.abc import Sequence

import pytest

from support.store.trajectories import Conversation, generation
from whet.config import AlgorithmConfig, RunConfig
from whet.training.diagnosis import (
    EXPLANATIONS,
    Cause,
    build_cause_metrics,
    count_causes,
    explain_metrics,
    find_equal_answers,
)
from whet.types import Group, Reward, Sampling, Trajectory

FREE = Sampling()
PAIRS = RunConfig(group_size=2)


def ended(
    number: int, tokens: Sequence[int], reward: float, sampling: Sampling = FREE
) -> Trajectory:
    conversation = Conversation(f"r{number}")
    if tokens:
        conversation.call([1, 2], generation(tokens, sampling=sampling))
    return conversation.ended(reward)


def twice(sampling: Sampling, other: Sampling | None = None) -> Group:
    return [ended(0, [3], 1.0, sampling), ended(1, [3], 1.0, other or sampling)]


@pytest.mark.parametrize(
    ("group", "cause"),
    [
        ([], Cause.FAILED),
        ([ended(0, [3], 1.0)], Cause.SINGLE),
        ([ended(0, [], 1.0), ended(1, [], 1.0)], Cause.NO_CALLS),
        (twice(Sampling(temperature=0)), Cause.TEMPERATURE),
        (twice(Sampling(seed=4)), Cause.SEED),
        (twice(Sampling(seed=4), Sampling(seed=5)), Cause.EQUAL_ANSWERS),
        (twice(Sampling(grammar="start: /a/")), Cause.GRAMMAR),
        (twice(FREE), Cause.EQUAL_ANSWERS),
        ([ended(0, [3], 0.5), ended(1, [4], 0.5)], Cause.EQUAL_REWARDS),
        ([ended(0, [3], 0.5), ended(1, [4], 0.25)], Cause.NO_CREDIT),
    ],
)
def test_the_likely_cause_of_a_group_without_signal(group: Group, cause: Cause) -> None:
    assert count_causes([group], PAIRS) == {cause: 1}
    assert EXPLANATIONS[cause]


@pytest.mark.parametrize("key", ["style", "reward"])
def test_rewards_that_are_only_logged_or_replaced_are_no_difference(key: str) -> None:
    group = [
        each.model_copy(update={"rewards": (Reward(value=value, key=key),)})
        for value, each in enumerate((ended(0, [3], 0.5), ended(1, [4], 0.5)))
    ]
    config = RunConfig(group_size=2, algorithm=AlgorithmConfig(logged_keys=("style",)))
    assert count_causes([group], config) == {Cause.EQUAL_REWARDS: 1}


def test_what_a_judge_logs_is_no_difference_in_reward() -> None:
    one, other = ended(0, [3], 0.5), ended(1, [4], 0.5)
    judged = one.model_copy(update={"rewards": (Reward(value=1.0, key="judge.failed"),)})
    assert count_causes([[judged, other]], PAIRS) == {Cause.EQUAL_REWARDS: 1}
    scored = one.model_copy(update={"rewards": (Reward(value=1.0, key="style"),)})
    assert count_causes([[scored, other]], PAIRS) == {Cause.NO_CREDIT: 1}


def test_different_answers_have_no_cause_of_equality() -> None:
    assert find_equal_answers([ended(0, [3], 1.0), ended(1, [4], 1.0)]) is None
    assert find_equal_answers([ended(0, [3], 1.0)]) is None


def test_the_causes_of_a_run_are_read_from_its_steps() -> None:
    silent = [twice(Sampling(temperature=0)), twice(Sampling(temperature=0)), twice(FREE)]
    first = build_cause_metrics(count_causes(silent, PAIRS)) | {"constrained_generations": 5}
    second = build_cause_metrics(count_causes(silent[:1], PAIRS))
    found = explain_metrics([first, second])
    most, less, constrained = re.split(r"; (?=\d+ x )", found)
    assert most.startswith("3 x all answers of a task are equal")
    assert "temperature" in most
    assert "runner.temperature" in most
    assert less.startswith("1 x ")
    assert constrained.startswith("5 x ")
