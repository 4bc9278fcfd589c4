"""Calls after a token, which Mistral writes in an older and a newer form:

[TOOL_CALLS][{"name": "calculator", "arguments": {"expression": "2 + 3"}}]
[TOOL_CALLS]calculator[ARGS]{"expression": "2 + 3"}
"""

import json
import re
from collections.abc import Sequence

from pydantic import JsonValue

from whet.gateway.messages import ToolCall
from whet.gateway.parsers.parser import (
    Format,
    Parsed,
    ToolParser,
    all_calls,
    json_call,
    load_object,
    mint,
)

TOKEN = "[TOOL_CALLS]"
NAMED = re.compile(
    r"\s*+([^\s\[{]++)(?:\[CALL_ID\][^\[\s{]*+)?+(?:\[ARGS\])?+\s*+(\{.*)", re.DOTALL
)


class MistralParser(ToolParser):
    """Everything after the token is calls."""

    format = Format(
        name="mistral",
        marks=(TOKEN,),
        markers=(TOKEN,),
        tokens=(TOKEN, "[ARGS]", "[CALL_ID]"),
    )

    def parse(self, text: str, tools: Sequence[JsonValue] = ()) -> Parsed | None:
        before, found, after = text.partition(TOKEN)
        if not found:
            return None
        calls: list[ToolCall | None] = []
        for body in after.split(TOKEN):
            calls += _listed(body.strip()) if body.lstrip().startswith("[") else [_named(body)]
        good = all_calls(calls)
        return Parsed(before.rstrip(), good) if good else None


def _named(body: str) -> ToolCall | None:
    match = NAMED.fullmatch(body)
    return mint(match[1], match[2].strip()) if match else None


def _listed(body: str) -> list[ToolCall | None]:
    """The objects of a list, each cut out so that its arguments stay as they were written."""
    calls: list[ToolCall | None] = []
    decoder = json.JSONDecoder()
    inside = body.removeprefix("[").lstrip()
    while inside and not inside.startswith("]"):
        try:
            _, end = decoder.raw_decode(inside)
        except (ValueError, RecursionError):
            return [None]
        calls.append(_without_id(inside[:end]))
        inside = inside[end:].lstrip()
        if not inside.startswith("]"):
            if not inside.startswith(","):
                return [None]
            inside = inside[1:].lstrip()
    return calls if inside == "]" else [None]


def _without_id(body: str) -> ToolCall | None:
    """A call that may carry an id of the model's own making, which is not used."""
    value = load_object(body)
    if value is not None and "id" in value:
        body = json.dumps({key: value[key] for key in value if key != "id"}, ensure_ascii=False)
    return json_call(body)
