"""Links from spans of model calls to the recorded calls, on spans of real SDKs."""

import gzip
import json
from collections.abc import Sequence
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from whet.app.inspection.span_links import SpanLink, link_spans
from whet.runners.tracers.openai_agents import convert_span
from whet.types import AttemptId, Call, CallId, Generation, Sampling, Span, SpanEvent

RECORDED = Path(__file__).parents[2] / "support" / "recordings" / "spans"
numbers = count(1)


def call(id: str, at_s: float, tool_calls: Sequence[str] = ()) -> Call:
    message: dict[str, Any] = {"role": "assistant", "content": "It is sunny."}
    if tool_calls:
        message["tool_calls"] = [
            {"id": each, "name": "get_weather", "arguments": "{}"} for each in tool_calls
        ]
    generation = Generation(
        tokens=(1,), logprobs=(0.0,), versions=(0,), stop="stop", sampling=Sampling(),
        message=message,
    )  # fmt: skip
    return Call(
        id=CallId(id),
        attempt=AttemptId("r0.1"),
        parent=None,
        root="",
        messages=(),
        prompt_suffix=(),
        prompt_length=0,
        prompt_digest="",
        generations=(generation,),
        created=at_s,
    )


def span(start_s: float, end_s: float, operation: str = "chat", **attributes: Any) -> Span:
    return Span(
        trace_id="ab" * 16,
        span_id=f"{next(numbers):016x}",
        name=operation,
        start=int(start_s * 1e9),
        end=int(end_s * 1e9),
        attributes={"gen_ai.operation.name": operation, **attributes},
    )


def recorded(name: str) -> list[Span]:
    """The spans of the first trace in a recording; those without a time follow each other."""
    lines = gzip.decompress((RECORDED / name).read_bytes()).splitlines()
    records = [json.loads(line) for line in lines]
    records = [each for each in records if "name" in each and not each.get("log")]
    spans: list[Span] = []
    for number, each in enumerate(records):
        if each["trace_id"] != records[0]["trace_id"]:
            continue
        began = each["attributes"].get("gen_ai.event.start_time")
        start = datetime.fromisoformat(began).timestamp() if began else 1000.0 * number
        spans.append(
            Span(
                trace_id=each["trace_id"],
                span_id=each["span_id"],
                parent_id=each["parent"] or None,
                name=each["name"],
                start=int(start * 1e9),
                end=int(start * 1e9 + each["dur_ms"] * 1e6),
                attributes=each["attributes"],
                events=tuple(
                    SpanEvent(name=event["name"], time=0, attributes=event["attributes"])
                    for event in each["events"]
                ),
            )
        )
    return spans


def test_a_span_that_names_its_reply_is_joined_by_that() -> None:
    for name, prefix in (("pydantic-ai", "chatcmpl-"), ("agent-framework", "resp_")):
        spans = recorded(f"otel-{name}.jsonl.gz")
        named = {
            span.span_id: str(span.attributes["gen_ai.response.id"]).removeprefix(prefix)
            for span in spans
            if span.attributes["gen_ai.operation.name"] == "chat"
        }
        assert len(named) == 2
        calls = [call(id, at_s=0.0) for id in named.values()]
        assert link_spans(spans, calls) == {
            span: SpanLink(CallId(id), "response id") for span, id in named.items()
        }


def test_strands_names_no_reply_but_its_tool_calls_and_times_tell() -> None:
    spans = recorded("otel-strands-vllm.jsonl.gz")
    first, second = [span for span in spans if span.name == "chat"]
    [tool] = [span for span in spans if span.name.startswith("execute_tool")]
    id = str(tool.attributes["gen_ai.tool.call.id"])
    # The second was asked with the tool call of the first, and is not about that for it.
    assert id in json.dumps([event.attributes for event in second.events])
    calls = [call("a", first.start / 1e9 + 0.001, [id]), call("b", second.start / 1e9 + 0.001)]
    assert link_spans(spans, calls) == {
        first.span_id: SpanLink(CallId("a"), "tool call"),
        second.span_id: SpanLink(CallId("b"), "time"),
    }


def test_the_agents_sdk_names_responses() -> None:
    records = json.loads(gzip.decompress((RECORDED / "trace-openai-agents.json.gz").read_bytes()))
    spans = [convert_span(each) for kind, each in records if kind == "span"][:7]
    ids = [s.attributes["gen_ai.response.id"] for s in spans if s.name == "chat"]
    calls = [call(str(id).removeprefix("resp_"), at_s=0.0) for id in ids]
    assert len(calls) == 2
    links = link_spans(spans, calls)
    assert list(links.values()) == [SpanLink(each.id, "response id") for each in calls]


def test_time_tells_only_where_one_call_is_left() -> None:
    alone, both = span(1, 2), span(10, 20)
    calls = [call("a", 1.5), call("b", 12), call("c", 13)]
    assert link_spans([alone, both], calls) == {alone.span_id: SpanLink(CallId("a"), "time")}
    known = span(11, 14, **{"gen_ai.response.id": "msg_b"})
    assert link_spans([both, known], calls)[both.span_id] == SpanLink(CallId("c"), "time")


def test_spans_of_agents_and_tools_are_about_no_single_call() -> None:
    calls = [call("a", 1.5, ["call_0123456789"])]
    agent = span(1, 2, "invoke_agent", **{"gen_ai.response.id": "chatcmpl-a"})
    tool = span(1, 2, "execute_tool", **{"gen_ai.tool.call.id": "call_0123456789"})
    assert link_spans([agent, tool], calls) == {}


def test_older_events_and_plain_values_tell_too() -> None:
    calls = [call("a", 0.0, ["call_0123456789"])]
    choice = SpanEvent(
        name="gen_ai.choice", time=0, attributes={"message": '[{"id": "call_0123456789"}]'}
    )
    old = span(1, 2).model_copy(update={"events": (choice,)})
    output: Any = [{"tool_calls": [{"id": "call_0123456789"}]}]
    listed = span(1, 2, **{"openai_agents.output": output})
    assert {joint.by for joint in link_spans([old, listed], calls).values()} == {"tool call"}
    assert len(link_spans([old, listed], calls)) == 2
