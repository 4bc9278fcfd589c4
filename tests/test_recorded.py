"""Tokens told by spans become rows of single calls."""

from collections.abc import Sequence

import pytest
from pydantic import JsonValue

from trajectories import Conversation
from whet.protocols import Scorer
from whet.recorded import PROMPT, SAMPLED, calls_of_spans
from whet.rows import build_rows
from whet.types import AttemptId, Credit, Span, Trajectory

pytestmark = pytest.mark.anyio


class Counting(Scorer):
    """The log-probability of a token is its place, counted down from -1."""

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        return [tuple(-float(at) for at in range(1, len(ids))) for ids in sequences]


def span(number: int, **attributes: JsonValue) -> Span:
    told = {PROMPT: attributes.pop("prompt", None), SAMPLED: attributes.pop("sampled", None)}
    return Span(
        trace_id="0" * 32, span_id=f"{number:016x}", name="chat", start=number, end=number + 1,
        attributes={name: value for name, value in told.items() if value is not None},
    )  # fmt: skip


async def test_each_span_with_tokens_is_a_call_and_a_row() -> None:
    spans = [
        span(1, prompt=[5, 6, 7], sampled=[8, 9]),
        span(2),
        span(3, prompt=[[5, 6, 7, 8, 9, 1]], sampled=[[2]]),
    ]
    calls = await calls_of_spans(AttemptId("a"), spans, Counting(), version=4, stop_ids=[2])
    attempt = Conversation().attempt
    credited = Trajectory(attempt=attempt, calls=tuple(calls), rewards=(), reward=1.0)
    built = build_rows([Credit.even(credited, 0.5)])
    assert built.unproven == ()
    assert [row.tokens for row in built.rows] == [(5, 6, 7, 8, 9), (5, 6, 7, 8, 9, 1, 2)]
    [[first], [second]] = [row.spans for row in built.rows]
    assert (first.start, first.logprobs, first.versions) == (3, (-3.0, -4.0), (4, 4))
    assert (second.start, second.logprobs, second.versions) == (6, (-6.0,), (4,))
    assert [call.generations[0].stop for call in calls] == ["length", "stop"]


@pytest.mark.parametrize("ids", [[], ["5"], [1.5], [True], [-1], "5 6", {}, [[1], [2]]])
async def test_what_is_no_list_of_ids_is_left_out(ids: JsonValue) -> None:
    for told in (span(1, prompt=ids, sampled=[3]), span(1, prompt=[3], sampled=ids)):
        assert await calls_of_spans(AttemptId("a"), [told], Counting(), version=0) == []
