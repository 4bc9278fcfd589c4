"""Numbers are stored exactly."""

from hypothesis import given
from hypothesis import strategies as st

from whet.store.codec import pack_floats, pack_runs, unpack_floats, unpack_runs, unpack_tokens
from whet.types import pack_tokens

INT32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(INT32))
def test_ints_are_unpacked_as_they_were_packed(values: list[int]) -> None:
    assert unpack_tokens(pack_tokens(values)) == tuple(values)


@given(st.lists(st.floats(allow_nan=True)))
def test_floats_are_unpacked_bit_for_bit(values: list[float]) -> None:
    packed = pack_floats(values)
    assert pack_floats(unpack_floats(packed)) == packed
    assert list(map(repr, unpack_floats(packed))) == list(map(repr, values))


@given(st.lists(st.integers(0, 3)) | st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_runs_are_unpacked_as_they_were_packed(values: list[int]) -> None:
    assert unpack_runs(pack_runs(values)) == tuple(values)
