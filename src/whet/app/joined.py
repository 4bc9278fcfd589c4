"""Which call a span of a model call is about, and by what that is known."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from pydantic import JsonValue

from whet.runners.running import REPLY_PREFIX
from whet.types import Call, CallId, Span

OPERATIONS = {"chat", "text_completion", "generate_content"}
"""What the GenAI conventions call an operation that asks a model."""

SAID = {"gen_ai.output.messages", "openai_agents.output"}
"""Attributes, of a span or of its events, that hold what a model answered; what it was asked has
the ids of earlier tool calls too."""

CHOICE = "gen_ai.choice"
"""The event that does so in the older conventions."""

ID = re.compile(r"[A-Za-z0-9_-]{8,}")

By = Literal["response id", "tool call", "time"]


class Joint(NamedTuple):
    """The call of a span."""

    call: CallId
    by: By


def join(spans: Sequence[Span], calls: Sequence[Call]) -> dict[str, Joint]:
    """The calls of an attempt that its spans are about, by span id.

    A span that names the reply's id is about the call of that id. Else the tool calls in its answer
    tell, whose ids are the gateway's own. Else it is the one call that began while the span was
    open and is no other span's; where there are several, none.
    """
    asked = [span for span in spans if _asks_model(span)]
    found: dict[str, Joint] = {}
    known = {call.id for call in calls}
    tools = {id: call.id for call in calls for id in _tool_calls(call)}
    for span in asked:
        named = str(span.attributes.get("gen_ai.response.id") or "")
        replied = CallId(REPLY_PREFIX.sub("", named))
        by_tool = {tools[id] for text in _said(span) for id in ID.findall(text) if id in tools}
        if replied in known:
            found[span.span_id] = Joint(replied, "response id")
        elif len(by_tool) == 1:
            found[span.span_id] = Joint(by_tool.pop(), "tool call")
    taken = {joint.call for joint in found.values()}
    left = [call for call in calls if call.generations and call.id not in taken]
    for span in asked:
        within = [call.id for call in left if span.start <= call.created * 1e9 <= span.end]
        if span.span_id not in found and len(within) == 1:
            found[span.span_id] = Joint(within[0], "time")
    return found


def _asks_model(span: Span) -> bool:
    operation = span.attributes.get("gen_ai.operation.name")
    # The span of an agent may have the id of its last reply, and is not about that call alone.
    return operation in OPERATIONS or (
        operation is None and "gen_ai.response.id" in span.attributes
    )


def _tool_calls(call: Call) -> Iterator[str]:
    for generation in call.generations:
        listed = generation.message.get("tool_calls")
        for each in listed if isinstance(listed, list) else []:
            if isinstance(each, dict) and isinstance(each.get("id"), str):
                yield str(each["id"])


def _said(span: Span) -> Iterator[str]:
    """What the model answered, wherever the span keeps it, as text."""
    for attributes in (span.attributes, *(event.attributes for event in span.events)):
        yield from (_text(attributes[key]) for key in SAID & attributes.keys())
    yield from (_text(event.attributes) for event in span.events if event.name == CHOICE)


def _text(value: JsonValue | Mapping[str, JsonValue]) -> str:
    return value if isinstance(value, str) else json.dumps(value)
