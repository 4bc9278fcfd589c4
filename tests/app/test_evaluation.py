from itertools import product
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.app.evaluation import Scores, evaluation_rollouts, gain_interval, mean
from whet.config import RunConfig
from whet.types import Mode

SCORES = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 1.0])))


def test_the_mean_is_over_the_rollouts_that_did_not_fail() -> None:
    assert mean([1.0, None, 0.0, None]) == 0.5
    assert mean([None]) == mean([]) == 0.0


def test_failed_rollouts_are_counted() -> None:
    assert Scores(greedy=(1.0, None), sampled=(None, None)).failed == 3


def test_the_interval_agrees_with_every_resample_of_a_case_done_by_hand() -> None:
    # Gains +1, +1, 0, -1: all 4^4 resamples are equally likely, so the quantiles are exact.
    before, after = [0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]
    means = sorted(fmean(drawn) for drawn in product([1, 1, 0, -1], repeat=4))
    exact = (means[int(0.025 * len(means))], means[int(0.975 * len(means)) - 1])

    found = gain_interval(before, after, resamples=20_000)

    assert exact == (-0.5, 1.0)
    assert found == pytest.approx(exact)


def test_the_interval_is_paired_and_not_blurred_by_how_hard_tasks_are() -> None:
    # Every task gains exactly 0.1, though the tasks themselves differ widely.
    before = [i / 100 for i in range(90)]
    low, high = gain_interval(before, [b + 0.1 for b in before], resamples=500)
    assert low == pytest.approx(0.1)
    assert high == pytest.approx(0.1)


def test_the_interval_is_the_same_every_time() -> None:
    before, after = [0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]
    first = gain_interval(before, after, resamples=1000)
    assert first == gain_interval(before, after, resamples=1000)


def test_a_task_that_failed_on_either_side_is_left_out() -> None:
    whole = gain_interval([0.0, 1.0], [1.0, 1.0], resamples=1000)
    assert gain_interval([0.0, None, 1.0, 0.0], [1.0, 1.0, 1.0, None], resamples=1000) == whole
    assert gain_interval([None], [1.0], resamples=100) == (0.0, 0.0)


@given(SCORES)
def test_the_interval_lies_within_the_gains_and_holds_the_median(
    pairs: list[tuple[float, float]],
) -> None:
    gains = [after - before for before, after in pairs]
    low, high = gain_interval([b for b, _ in pairs], [a for _, a in pairs], resamples=100)
    assert low <= high
    assert min(gains, default=0) - 1e-9 <= low
    assert high <= max(gains, default=0) + 1e-9


def test_each_task_is_tried_greedily_and_sampled_and_never_learned_from() -> None:
    rollouts = evaluation_rollouts("before", ["a", "b"], RunConfig())

    assert [r.task for r in rollouts] == ["a", "b", "a", "b"]
    assert [r.sampling.temperature for r in rollouts] == [0.0, 0.0, 1.0, 1.0]
    assert {r.mode for r in rollouts} == {Mode.VAL}
    assert len({r.id for r in rollouts}) == 4
    assert not {r.id for r in rollouts} & {
        r.id for r in evaluation_rollouts("after", ["a"], RunConfig())
    }
