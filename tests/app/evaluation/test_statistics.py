"""Statistics of evaluations: pass@k, means, confidence intervals and counts of failures."""

import math
import random
from io import StringIO
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from whet.app.evaluation.by_policy import PolicyUse, compare_by_policy, print_by_policy
from whet.app.evaluation.comparison import compare, print_comparison
from whet.app.evaluation.statistics import (
    Estimate,
    Interval,
    Scores,
    Z,
    complete_tasks,
    compute_measures,
    compute_pass_at_k,
    count_failures_by_kind,
    estimate,
    estimate_gain,
)
from whet.app.experiment import Result
from whet.config import EvaluationConfig
from whet.types import Failure, FailureKind

REWARDS = st.lists(st.sampled_from([0.0, 0.4, 1.0]), min_size=1, max_size=8)
PAIRS = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 1.0])))


@given(REWARDS, st.integers(1, 8))
def test_pass_at_k_is_the_share_of_all_subsets_with_a_passing_sample(
    rewards: list[float], k: int
) -> None:
    k = min(k, len(rewards))
    expected = fmean(max(subset) >= 0.5 for subset in combinations(rewards, k))
    assert compute_pass_at_k(rewards, k, 0.5) == pytest.approx(expected)


def test_pass_at_k_is_unbiased_where_the_obvious_estimate_is_not() -> None:
    # Truth: a sample passes with p = 0.3, so one of two does with 1 - 0.7^2 = 0.51.
    outcomes = list(product([0.0, 1.0], repeat=4))
    chances = [math.prod(0.3 if reward else 0.7 for reward in each) for each in outcomes]
    expected = sum(
        chance * compute_pass_at_k(each, 2, 1.0)
        for each, chance in zip(outcomes, chances, strict=True)
    )
    assert expected == pytest.approx(0.51)


def test_measures_are_one_number_for_each_complete_task() -> None:
    scores = Scores(
        greedy=(1.0, None, 0.0),
        sampled=((0.0, 1.0, 0.0, 1.0), (0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0)),
    )
    tasks = complete_tasks([scores])
    assert tasks == [0, 2]
    found = compute_measures(scores, tasks, pass_threshold=1.0)
    assert list(found) == ["greedy", "sampled", "pass@1", "pass@2", "pass@4"]
    assert found["greedy"] == [1.0, 0.0]
    assert found["sampled"] == found["pass@1"] == [0.5, 0.25]
    assert found["pass@2"] == [pytest.approx(5 / 6), 0.5]
    assert found["pass@4"] == [1.0, 1.0]


def test_all_measures_and_models_of_a_table_share_their_tasks() -> None:
    base = Scores(sampled=((1.0, None), (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)))
    trained = Scores(sampled=((1.0, 1.0), (1.0, 1.0), (0.0, None), (1.0, 1.0)))
    found = compare({"base": base, "trained": trained}, EvaluationConfig())
    assert found.compared == [1, 3]
    assert found.describe_tasks() == "2 of 4 held-out tasks"
    for measure, by_model in found.measures.items():
        before, after = by_model["base"], by_model["trained"]
        gained = found.gains[measure]["trained"]
        assert before
        assert after
        assert gained
        assert before.tasks == after.tasks == gained.tasks == 2
        assert gained.mean == pytest.approx(after.mean - before.mean)


def test_an_evaluation_without_comparable_tasks_reports_that() -> None:
    base = Scores(sampled=((1.0, None), (None, 1.0)))
    trained = Scores(sampled=((1.0, 1.0), (0.0, 1.0)))
    found = compare({"base": base, "trained": trained}, EvaluationConfig())
    assert found.compared == []
    assert list(found.measures) == ["sampled", "pass@1", "pass@2"]
    for measure, by_model in found.measures.items():
        assert (by_model["base"], found.gains[measure]["trained"]) == (None, None)
    console = Console(record=True, width=100, quiet=False, file=StringIO())
    print_comparison(console, found, "nothing")
    text = console.export_text()
    assert text.count(" - ") == 9
    assert "0 of 2 held-out tasks" in text
    assert found.as_json()["base"] == {
        "sampled": None,
        "pass@1": None,
        "pass@2": None,
        "failed": 0,
        "failures": {},
    }


@pytest.mark.parametrize("failing", ["base", "trained"])
def test_where_every_rollout_failed_the_table_has_no_gain(failing: str) -> None:
    failure = Failure(kind=FailureKind.AGENT, message="the agent raised")
    fine = Scores(greedy=(1.0, 0.0))
    scores = {"base": fine, "trained": fine}
    scores[failing] = Scores(greedy=(0.0, 0.0), failures=(failure, failure))
    console = Console(record=True, width=100, file=StringIO())
    print_comparison(console, compare(scores, EvaluationConfig()), "held out")
    text = console.export_text()
    assert text.count("all failed") == 2, "the model and the gain"
    assert "points" not in text


@pytest.mark.parametrize("failing", ["base", "trained"])
def test_where_every_rollout_failed_the_numbers_for_machines_are_null(failing: str) -> None:
    failure = Failure(kind=FailureKind.AGENT, message="the agent raised")
    scores = {"base": Scores(greedy=(1.0, 0.0)), "trained": Scores(greedy=(1.0, 0.0))}
    scores[failing] = Scores(greedy=(0.0, 0.0), failures=(failure, failure))
    found = compare(scores, EvaluationConfig())
    numbers: dict[str, Any] = found.as_json()
    [other] = scores.keys() - {failing}
    assert (numbers[failing]["greedy"], numbers[failing]["failed"]) == (None, 2)
    assert numbers[other]["greedy"]["mean"] == 0.5
    assert numbers["trained"]["gain"] == {"greedy": None}
    result = Result(Path("run"), (), found, 1.0)
    report: dict[str, Any] = result.as_json()
    assert report["gain_ci95"] is None
    means = {"base": report["before"]["greedy"], "trained": report["after"]["greedy"]}
    assert means == {failing: None, other: 0.5}
    compared = {name for name in result.metrics() if name.endswith("/greedy")}
    assert compared == {f"{other}/greedy"}


def test_where_every_rollout_of_a_policy_failed_its_table_has_no_gain() -> None:
    failure = Failure(kind=FailureKind.AGENT, message="the agent raised")
    scores = {
        "base": Scores(greedy=(1.0, 0.0), failures=(failure,), failed_tasks=(1,)),
        "trained": Scores(greedy=(1.0, 1.0)),
    }
    uses = {
        name: {"a": PolicyUse(frozenset({0}), 1, 1), "b": PolicyUse(frozenset({1}), 1, 1)}
        for name in scores
    }
    console = Console(record=True, width=100, file=StringIO())
    print_by_policy(console, compare_by_policy(scores, uses, ["a", "b"], EvaluationConfig()))
    text = console.export_text()
    [a] = [line for line in text.splitlines() if " a " in line]
    [b] = [line for line in text.splitlines() if " b " in line]
    assert ("points" in a, "all failed" in a) == (True, False)
    assert ("points" in b, b.count("all failed")) == (False, 2), "the model and the gain"


def test_a_model_without_a_rollout_that_ended_well_has_no_interval() -> None:
    failure = Failure(kind=FailureKind.AGENT, message="the agent raised")
    scores = {"base": Scores(greedy=(0.0, 0.0), failures=(failure, failure))}
    console = Console(record=True, width=100, file=StringIO())
    print_comparison(console, compare(scores, EvaluationConfig()), "held out")
    text = console.export_text()
    assert "all failed" in text
    assert "[0, " not in text


@pytest.mark.parametrize(
    ("samples", "ks"), [(0, []), (1, []), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])]
)
def test_k_goes_up_in_powers_of_two_to_all_samples(samples: int, ks: list[int]) -> None:
    scores = Scores(greedy=(1.0,), sampled=((1.0,) * samples,))
    found = compute_measures(scores, [0], pass_threshold=1.0)
    assert [name for name in found if name.startswith("pass")] == [f"pass@{k}" for k in ks]


def interval(found: Estimate | None) -> Interval:
    assert found is not None
    assert found.ci95 is not None
    return found.ci95


def test_the_interval_of_a_case_done_by_hand() -> None:
    # 8 of 10 solved; with two more solved and two unsolved 10 of 14.
    center = 10 / 14
    reach = Z * math.sqrt(center * (1 - center) / 14)
    found = interval(estimate([1.0] * 8 + [0.0] * 2, bounded=True))
    assert found == pytest.approx((center - reach, center + reach))
    # Gains +1, +1, 0, -1, and half a +1, half a -1 and a 0.
    center = 1 / 6
    reach = Z * math.sqrt((4 / 6 - center**2) / 6)
    found = estimate_gain([0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0], bounded=True)
    assert found is not None
    assert found.mean == 0.25
    assert found.ci95 == pytest.approx((center - reach, center + reach))


def test_rewards_without_bounds_get_students_t() -> None:
    found = interval(estimate([1.0, 2.0, 3.0, 4.0, 10.0], bounded=False))
    assert found == pytest.approx((4 - 4.3897, 4 + 4.3897), abs=0.02)  # t = 2.776, s = 3.536
    assert interval(estimate([1.0, 3.0], bounded=False)).high == pytest.approx(14.706, abs=1e-3)
    assert estimate([7.0], bounded=False) == (7.0, None, 1)
    assert estimate([], bounded=False) is None


def test_the_interval_is_paired_and_not_blurred_by_how_hard_tasks_are() -> None:
    # Every task gains exactly 0.1, though the tasks themselves differ widely.
    before = [i / 100 for i in range(90)]
    after = [b + 0.1 for b in before]
    assert interval(estimate_gain(before, after, bounded=False)) == pytest.approx((0.1, 0.1))
    low, high = interval(estimate_gain(before, after, bounded=True))
    alone = interval(estimate(before, bounded=True))
    assert high - low < 0.06 < 0.08 < alone.high - alone.low


def test_pairing_matters_the_same_scores_in_another_order_are_less_sure() -> None:
    before = [float(i % 2) for i in range(40)]
    better = [min(1.0, b + float(i % 5 == 0)) for i, b in enumerate(before)]
    shuffled = random.Random(1).sample(better, len(better))
    paired, unpaired = (
        interval(estimate_gain(before, a, bounded=True)) for a in (better, shuffled)
    )
    assert paired.high - paired.low < 0.7 * (unpaired.high - unpaired.low)


@pytest.mark.parametrize("tasks", [5, 10, 20, 50])
@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("chance", [0.5, 0.95, 0.99])
def test_the_interval_of_a_model_holds_near_the_bounds_and_for_few_tasks(
    chance: float, samples: int, tasks: int
) -> None:
    draw = random.Random(7)

    def score() -> float:
        return fmean(float(draw.random() < chance) for _ in range(samples))

    found = [interval(estimate([score() for _ in range(tasks)], bounded=True)) for _ in range(600)]
    assert fmean(low <= chance <= high for low, high in found) >= 0.91
    assert all(low < high for low, high in found)


@pytest.mark.parametrize("tasks", [5, 10, 100])
def test_the_interval_of_a_gain_holds_for_few_tasks(tasks: int) -> None:
    # Tasks of varying difficulty; training raises the chance of solving each by 0.15.
    draw = random.Random(7)
    trials, held = 600, 0
    for _ in range(trials):
        hard = [draw.uniform(0.1, 0.7) for _ in range(tasks)]
        before = [float(draw.random() < p) for p in hard]
        after = [float(draw.random() < p + 0.15) for p in hard]
        low, high = interval(estimate_gain(before, after, bounded=True))
        held += low <= 0.15 <= high
    assert held / trials >= 0.92


@given(PAIRS)
def test_the_interval_holds_its_mean_and_stays_within_bounds(
    pairs: list[tuple[float, float]],
) -> None:
    found = estimate_gain([b for b, _ in pairs], [a for _, a in pairs], bounded=True)
    assert (found is None) == (not pairs)
    if found is not None:
        low, high = interval(found)
        assert -1 <= low <= found.mean <= high <= 1


def test_failures_are_counted_by_kind_with_an_example() -> None:
    raised = Failure(kind=FailureKind.AGENT, message="the agent raised: KeyError")
    slow = Failure(kind=FailureKind.TIMEOUT, message="too slow")
    scores = Scores(failures=(raised, slow, raised.model_copy(update={"message": "other"})))
    assert count_failures_by_kind(scores) == {
        "agent": (2, "the agent raised: KeyError"),
        "timeout": (1, "too slow"),
    }
