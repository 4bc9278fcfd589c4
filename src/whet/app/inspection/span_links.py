"""Links from OpenTelemetry spans of model calls to the recorded calls."""

import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from whet.io.genai_spans import is_model_call, parse_response_id, read_outputs
from whet.types import Call, CallId, Span

ID = re.compile(r"[A-Za-z0-9_-]{8,}")

By = Literal["response id", "tool call", "time"]


class SpanLink(NamedTuple):
    """The call that a span is about, and the evidence for it."""

    call: CallId
    by: By


def link_spans(spans: Sequence[Span], calls: Sequence[Call]) -> dict[str, SpanLink]:
    """Link the spans of an attempt to its calls, by span id.

    A span is linked by its response id; else by the tool-call ids in its output, which the gateway
    generated; else to the only unlinked call that began during the span. With several such calls it
    stays unlinked.
    """
    model_spans = [span for span in spans if is_model_call(span)]
    links: dict[str, SpanLink] = {}
    known = {call.id for call in calls}
    tools = {id: call.id for call in calls for id in _list_tool_calls(call)}
    for span in model_spans:
        replied = parse_response_id(str(span.attributes.get("gen_ai.response.id") or ""))
        by_tool = {
            tools[id] for text in read_outputs(span) for id in ID.findall(text) if id in tools
        }
        if replied in known:
            links[span.span_id] = SpanLink(replied, "response id")
        elif len(by_tool) == 1:
            links[span.span_id] = SpanLink(by_tool.pop(), "tool call")
    linked = {link.call for link in links.values()}
    left = [call for call in calls if call.generations and call.id not in linked]
    for span in model_spans:
        within = [call.id for call in left if span.start <= call.created * 1e9 <= span.end]
        if span.span_id not in links and len(within) == 1:
            links[span.span_id] = SpanLink(within[0], "time")
    return links


def _list_tool_calls(call: Call) -> Iterator[str]:
    for generation in call.generations:
        listed = generation.message.get("tool_calls")
        for each in listed if isinstance(listed, list) else []:
            if isinstance(each, dict) and isinstance(each.get("id"), str):
                yield str(each["id"])
