"""Chunks and stop strings of a request in progress."""

from collections.abc import Sequence

import pytest

from whet.engines.request import SampledTokens, SampleRequest
from whet.types import Sampling, TokenChunk


def decode_run(ids: Sequence[int]) -> str:
    """As tokenizers with byte fallback do: bytes in a row are text together, or none of them is."""
    try:
        return bytes(ids).decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(ids)


@pytest.mark.parametrize(
    ("before", "stop"), [("🙂", "\n"), ("日", "é"), ("日", "\n\n"), ("日本", "語"), ("", "🙂")]
)
def test_a_stop_string_after_characters_of_several_bytes_is_found(before: str, stop: str) -> None:
    sampling = Sampling(stop=(stop,))
    request = SampleRequest(tokens=[1], sampling=sampling, limit=99, stream=False, seed=0)
    sampled = [*(before + stop).encode()]
    chunks = [request.append(SampledTokens([id], [0.0]), 0, decode_run) for id in sampled]
    assert [chunk is not None for chunk in chunks] == [False] * (len(sampled) - 1) + [True]


def test_a_stop_reason_that_comes_alone_is_a_chunk_without_tokens() -> None:
    request = SampleRequest(tokens=[1, 2], sampling=Sampling(), limit=99, stream=True, seed=0)
    first = request.append(SampledTokens([3], [-0.5]), 7, decode_run)
    last = request.append(SampledTokens([], [], stop="stop"), 7, decode_run)
    assert first == TokenChunk((3,), (-0.5,), (7,))
    assert last == TokenChunk((), (), (), stop="stop")
