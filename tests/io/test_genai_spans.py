"""Spans with token ids become calls, each a row of its own."""

from collections.abc import Sequence

import pytest
from pydantic import JsonValue

from support.store.trajectories import Conversation
from whet.errors import ConfigError
from whet.io.genai_spans import (
    PROMPT_IDS,
    SAMPLED_IDS,
    build_calls_from_spans,
    find_untrainable_calls,
)
from whet.protocols import Scorer
from whet.training.rows import build_rows
from whet.types import AttemptId, Credit, Span, Trajectory

pytestmark = pytest.mark.anyio


class Counting(Scorer):
    """The log-probability of a token is its place, counted down from -1."""

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        return [tuple(-float(at) for at in range(1, len(ids))) for ids in sequences]


def span(number: int, **attributes: JsonValue) -> Span:
    ids = {PROMPT_IDS: attributes.pop("prompt", None), SAMPLED_IDS: attributes.pop("sampled", None)}
    return Span(
        trace_id="0" * 32, span_id=f"{number:016x}", name="chat", start=number, end=number + 1,
        attributes={name: value for name, value in ids.items() if value is not None},
    )  # fmt: skip


def calling(number: int, **attributes: JsonValue) -> Span:
    return span(number).model_copy(update={"attributes": attributes})


async def test_each_span_with_tokens_is_a_call_and_a_row() -> None:
    spans = [
        span(1, prompt=[5, 6, 7], sampled=[8, 9]),
        span(2),
        span(3, prompt=[[5, 6, 7, 8, 9, 1]], sampled=[[2]]),
    ]
    calls = await build_calls_from_spans(AttemptId("a"), spans, Counting(), version=4, stop_ids=[2])
    attempt = Conversation().attempt
    credited = Trajectory(attempt=attempt, calls=tuple(calls), rewards=(), reward=1.0)
    built = build_rows([Credit.even(credited, 0.5)])
    assert built.unproven == ()
    assert [row.tokens for row in built.rows] == [(5, 6, 7, 8, 9), (5, 6, 7, 8, 9, 1, 2)]
    [[first], [second]] = [row.segments for row in built.rows]
    assert (first.start, first.logprobs, first.versions) == (3, (-3.0, -4.0), (4, 4))
    assert (second.start, second.logprobs, second.versions) == (6, (-6.0,), (4,))
    assert [call.generations[0].stop for call in calls] == ["length", "stop"]


@pytest.mark.parametrize("ids", [[], ["5"], [1.5], [True], [-1], "5 6", {}, [[1], [2]]])
async def test_an_invalid_list_of_ids_is_reported_by_its_name(ids: JsonValue) -> None:
    for broken, name in (
        (span(1, prompt=ids, sampled=[3]), PROMPT_IDS),
        (span(1, prompt=[3], sampled=ids), SAMPLED_IDS),
    ):
        with pytest.raises(ConfigError, match=f"its span has an invalid list of ids in {name}"):
            await build_calls_from_spans(AttemptId("a"), [broken], Counting(), version=0)


async def test_a_call_without_token_ids_is_explained() -> None:
    address: dict[str, JsonValue] = {"server.address": "gpu-3", "server.port": 8000}
    span = calling(2, **{"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}, **address)
    with pytest.raises(ConfigError) as error:
        await build_calls_from_spans(AttemptId("a.1"), [span], Counting(), version=0)
    for part in (
        "call 'chat' (span 0000000000000002 of attempt 'a.1')",
        "went to gpu-3:8000 for model 'm'",
        f"its span has no {PROMPT_IDS}",
        "base_url=llm.base_url",
        "return_token_ids=True",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("attributes", "server"),
    [
        ({"gen_ai.request.model": "m", "gen_ai.system": "openai"}, "openai"),
        ({"openinference.span.kind": "LLM", "url.full": "http://h/v1"}, "http://h/v1"),
        ({"gen_ai.operation.name": "chat"}, "an unknown server"),
        (
            {"gen_ai.request.model": "m", "gen_ai.system": "strands-agents"},
            "an unknown server",
        ),
        ({"gen_ai.operation.name": "invoke_agent", "gen_ai.request.model": "m"}, None),
        ({"gen_ai.operation.name": "execute_tool"}, None),
        ({"http.method": "POST", "server.address": "h"}, None),
    ],
    ids=str,
)
def test_model_calls_are_distinguished_from_other_spans(
    attributes: dict[str, JsonValue], server: str | None
) -> None:
    found = [
        call.server for call in find_untrainable_calls(AttemptId("a"), [calling(1, **attributes)])
    ]
    assert found == ([server] if server else [])


async def test_calls_without_tokens_beside_others_are_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spans = [span(1, prompt=[5], sampled=[6]), calling(2, **{"gen_ai.operation.name": "chat"})]
    calls = await build_calls_from_spans(AttemptId("a"), spans, Counting(), version=0)
    assert [call.prompt_suffix for call in calls] == [(5,)]
    assert "calls left out count=1" in caplog.text
