import math
import random
from itertools import combinations, product
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.app.scores import Scores, estimate, failure_counts, gain, mean, measures, pass_at_k
from whet.types import Failure, FailureKind

REWARDS = st.lists(st.sampled_from([0.0, 0.4, 1.0]), min_size=1, max_size=8)
PAIRS = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 1.0])))


@given(REWARDS, st.integers(1, 8))
def test_pass_at_k_is_the_share_of_all_subsets_with_a_passing_sample(
    rewards: list[float], k: int
) -> None:
    subsets = list(combinations(rewards, k))
    expected = fmean(max(subset) >= 0.5 for subset in subsets) if subsets else None
    found = pass_at_k(rewards, k, 0.5)
    assert found == (None if expected is None else pytest.approx(expected))


def test_pass_at_k_is_unbiased_where_the_obvious_estimate_is_not() -> None:
    # Truth: a sample passes with p = 0.3, so one of two does with 1 - 0.7^2 = 0.51.
    outcomes = list(product([0.0, 1.0], repeat=4))
    chances = [math.prod(0.3 if reward else 0.7 for reward in each) for each in outcomes]
    expected = sum(
        chance * (pass_at_k(each, 2, 1.0) or 0.0)
        for each, chance in zip(outcomes, chances, strict=True)
    )
    assert expected == pytest.approx(0.51)


def test_the_mean_is_over_what_is_known() -> None:
    assert mean([1.0, None, 0.0, None]) == 0.5
    assert mean([None]) == mean([]) == 0.0


def test_measures_are_one_number_a_task_and_leave_failures_out() -> None:
    scores = Scores(
        greedy=(1.0, None),
        sampled=((0.0, 1.0, None, 1.0), (None, None, None, 0.0)),
    )
    found = measures(scores, pass_reward=1.0)
    assert list(found) == ["greedy", "sampled", "pass@1", "pass@2", "pass@4"]
    assert found["sampled"] == [pytest.approx(2 / 3), 0.0]
    assert found["pass@2"] == [1.0, None]  # of (0, 1, 1) every pair has a 1
    assert found["pass@4"] == [None, None]


@pytest.mark.parametrize(
    ("samples", "ks"), [(0, []), (1, []), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])]
)
def test_k_goes_up_in_powers_of_two_to_all_samples(samples: int, ks: list[int]) -> None:
    found = measures(Scores(greedy=(1.0,), sampled=((1.0,) * samples,)), pass_reward=1.0)
    assert [name for name in found if name.startswith("pass")] == [f"pass@{k}" for k in ks]


def test_the_interval_agrees_with_every_resample_of_a_case_done_by_hand() -> None:
    # Gains +1, +1, 0, -1: all 4^4 resamples are equally likely, so the quantiles are exact.
    before, after = [0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]
    means = sorted(fmean(drawn) for drawn in product([1, 1, 0, -1], repeat=4))
    exact = (means[int(0.025 * len(means))], means[int(0.975 * len(means)) - 1])

    found = gain(before, after, resamples=20_000)

    assert exact == (-0.5, 1.0)
    assert found.mean == 0.25
    assert found.ci95 == pytest.approx(exact)


def test_the_interval_is_paired_and_not_blurred_by_how_hard_tasks_are() -> None:
    # Every task gains exactly 0.1, though the tasks themselves differ widely.
    before = [i / 100 for i in range(90)]
    after = [b + 0.1 for b in before]
    assert gain(before, after, resamples=500).ci95 == pytest.approx((0.1, 0.1))
    alone = estimate(before, resamples=500).ci95
    assert alone.high - alone.low > 0.08


def test_pairing_matters_the_same_scores_in_another_order_are_less_sure() -> None:
    before = [float(i % 2) for i in range(40)]
    better = [min(1.0, b + float(i % 5 == 0)) for i, b in enumerate(before)]
    shuffled = random.Random(1).sample(better, len(better))
    paired, unpaired = (gain(before, a, resamples=2000) for a in (better, shuffled))
    assert paired.mean == pytest.approx(unpaired.mean)
    assert paired.ci95.high - paired.ci95.low < 0.6 * (unpaired.ci95.high - unpaired.ci95.low)


def test_the_interval_holds_the_truth_about_95_times_in_a_hundred() -> None:
    # Tasks of varying difficulty; training raises the chance of solving each by 0.15.
    draw = random.Random(7)
    trials, held = 400, 0
    for _ in range(trials):
        hard = [draw.uniform(0.1, 0.7) for _ in range(100)]
        before = [float(draw.random() < p) for p in hard]
        after = [float(draw.random() < p + 0.15) for p in hard]
        low, high = gain(before, after, resamples=400).ci95
        held += low <= 0.15 <= high
    assert 0.92 <= held / trials <= 0.98


def test_the_interval_is_the_same_every_time() -> None:
    before, after = [0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]
    assert gain(before, after, resamples=1000) == gain(before, after, resamples=1000)


def test_a_task_that_failed_on_either_side_is_left_out() -> None:
    whole = gain([0.0, 1.0], [1.0, 1.0], resamples=1000)
    assert gain([0.0, None, 1.0, 0.0], [1.0, 1.0, 1.0, None], resamples=1000) == whole
    assert gain([None], [1.0], resamples=100) == (0.0, (0.0, 0.0), 0)


@given(PAIRS)
def test_the_interval_lies_within_the_gains(pairs: list[tuple[float, float]]) -> None:
    gains = [after - before for before, after in pairs]
    low, high = gain([b for b, _ in pairs], [a for _, a in pairs], resamples=100).ci95
    assert low <= high
    assert min(gains, default=0) - 1e-9 <= low
    assert high <= max(gains, default=0) + 1e-9


def test_failures_are_counted_by_kind_with_an_example() -> None:
    raised = Failure(kind=FailureKind.AGENT, message="the agent raised: KeyError")
    slow = Failure(kind=FailureKind.TIMEOUT, message="too slow")
    scores = Scores(failures=(raised, slow, raised.model_copy(update={"message": "other"})))
    assert failure_counts(scores) == {
        "agent": (2, "the agent raised: KeyError"),
        "timeout": (1, "too slow"),
    }
