"""Properties of estimators that hold for any rewards."""

from collections.abc import Sequence

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.store.steps import advantages
from whet.algorithms.grpo import GRPO
from whet.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from whet.algorithms.rloo import RLOO
from whet.config import AlgorithmConfig
from whet.protocols import Algorithm

# Eighths are exact: what is equal stays equal after a shift.
rewards = st.integers(-40, 40).map(lambda eighths: eighths / 8)
groups = st.lists(st.lists(rewards, min_size=2, max_size=5), min_size=1, max_size=4)

GROUPED = [
    GRPO(AlgorithmConfig()),
    GRPO(AlgorithmConfig(divide_by_std=True)),
    RLOO(AlgorithmConfig()),
]
STEPWISE = [
    ReinforcePlusPlus(AlgorithmConfig()),
    ReinforcePlusPlus(AlgorithmConfig(group_baseline=True)),
]


def credit(algorithm: Algorithm, step: Sequence[Sequence[float]]) -> list[list[float]]:
    return anyio.run(advantages, algorithm, step)


def close(step: Sequence[Sequence[float]]) -> list[object]:
    return [pytest.approx(group, abs=1e-9) for group in step]


@pytest.mark.parametrize("algorithm", [*GROUPED, *STEPWISE])
@given(step=groups, shift=rewards)
def test_a_shift_of_all_rewards_changes_nothing(
    algorithm: Algorithm, step: list[list[float]], shift: float
) -> None:
    shifted = [[reward + shift for reward in group] for group in step]
    assert credit(algorithm, shifted) == close(credit(algorithm, step))


@pytest.mark.parametrize("algorithm", GROUPED)
@given(step=groups, shifts=st.lists(rewards, min_size=4, max_size=4))
def test_nor_does_a_shift_of_each_group_where_groups_are_compared_with_themselves(
    algorithm: Algorithm, step: list[list[float]], shifts: list[float]
) -> None:
    pairs = zip(step, shifts, strict=False)
    shifted = [[reward + shift for reward in group] for group, shift in pairs]
    assert credit(algorithm, shifted) == close(credit(algorithm, step))


@pytest.mark.parametrize("algorithm", [*GROUPED, *STEPWISE])
@given(step=groups, data=st.data())
def test_the_order_of_rollouts_and_groups_does_not_matter(
    algorithm: Algorithm, step: list[list[float]], data: st.DataObject
) -> None:
    orders = [data.draw(st.permutations(range(len(group)))) for group in step]
    places = data.draw(st.permutations(range(len(step))))
    mixed = [[step[place][index] for index in orders[place]] for place in places]
    straight = credit(algorithm, step)
    expected = [
        [straight[place][index] for index in orders[place]] if straight[place] else []
        for place in places
    ]
    assert credit(algorithm, mixed) == close(expected)


@pytest.mark.parametrize("algorithm", GROUPED)
@given(step=groups)
def test_the_advantages_of_a_group_sum_to_zero(
    algorithm: Algorithm, step: list[list[float]]
) -> None:
    assert all(abs(sum(group)) < 1e-9 for group in credit(algorithm, step))


@pytest.mark.parametrize("algorithm", STEPWISE)
@given(step=groups)
def test_the_advantages_of_a_step_sum_to_zero(
    algorithm: Algorithm, step: list[list[float]]
) -> None:
    assert abs(sum(value for group in credit(algorithm, step) for value in group)) < 1e-6


@given(step=groups)
def test_rloo_is_grpo_stretched(step: list[list[float]]) -> None:
    grpo = credit(GRPO(AlgorithmConfig()), step)
    stretched = [[value * len(group) / (len(group) - 1) for value in group] for group in grpo]
    assert credit(RLOO(AlgorithmConfig()), step) == close(stretched)
