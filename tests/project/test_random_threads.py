"""Property tests do not fail because of a thread that draws random numbers meanwhile."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def numbers(draw: st.DrawFn) -> int:
    random.random()  # as a thread would, such as that of a client which pauses between its retries
    return draw(st.integers())


@settings(max_examples=5)
@given(number=numbers())
def test_random_numbers_of_others_are_no_fault_of_a_strategy(number: int) -> None:
    assert isinstance(number, int)
