"""Calls as JSON between tags, which Qwen, SmolLM and the tiny model write:

<tool_call>
{"name": "calculator", "arguments": {"expression": "2 + 3"}}
</tool_call>
"""

import re
from collections.abc import Sequence

from pydantic import JsonValue

from whet.gateway.messages import ToolCall
from whet.gateway.parsers.parser import Format, Parsed, ToolParser, all_calls, json_call

OPEN = "<tool_call>"
CALL = re.compile(r"\s*+<tool_call>(.*?)</tool_call>\s*+", re.DOTALL)


class HermesParser(ToolParser):
    """Nothing but white space may stand between or after the calls."""

    format = Format(
        name="hermes",
        marks=(OPEN,),
        markers=(OPEN,),
        tokens=(OPEN, "</tool_call>"),
    )

    def parse(self, text: str, tools: Sequence[JsonValue] = ()) -> Parsed | None:
        before, found, _ = text.partition(OPEN)
        calls = _calls(text[len(before) :]) if found else None
        return Parsed(before.rstrip(), calls) if calls else None


def _calls(text: str) -> tuple[ToolCall, ...] | None:
    calls: list[ToolCall | None] = []
    position = 0
    while position < len(text):
        match = CALL.match(text, position)
        if match is None:
            return None
        calls.append(json_call(match[1].strip()))
        position = match.end()
    return all_calls(calls)
