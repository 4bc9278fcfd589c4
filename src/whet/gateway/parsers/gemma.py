"""Calls in Gemma 4's own notation: keys are bare and strings stand between tokens.

<|tool_call>call:calculator{expression:<|"|>2 + 3<|"|>}<tool_call|>
"""

import json
import re
from collections.abc import Sequence

from pydantic import JsonValue

from whet.gateway.messages import ToolCall
from whet.gateway.parsers.parser import Format, Parsed, ToolParser, all_calls, mint

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
CALL = re.compile(r"\s*+<\|tool_call>call:([^\s{]++)(\{.*?\})<tool_call\|>\s*+", re.DOTALL)
PART = re.compile(r'<\|"\|>(.*?)<\|"\|>|([A-Za-z_][\w.-]*+)(?=\s?:)|([^<\w]|\w++|<)', re.DOTALL)


class GemmaParser(ToolParser):
    """Nothing but white space may stand between or after the calls."""

    format = Format(
        name="gemma4",
        marks=("<|tool_call>call:",),
        markers=(OPEN,),
        tokens=(OPEN, CLOSE, QUOTE),
    )

    def parse(self, text: str, tools: Sequence[JsonValue] = ()) -> Parsed | None:
        before, found, _ = text.partition(OPEN)
        position = len(before)
        calls: list[ToolCall | None] = []
        while found and position < len(text):
            match = CALL.match(text, position)
            if match is None:
                return None
            calls.append(mint(match[1], PART.sub(_as_json, match[2])))
            position = match.end()
        good_calls = all_calls(calls)
        return Parsed(before.rstrip(), good_calls) if good_calls else None


def _as_json(part: re.Match[str]) -> str:
    quoted, key, other = part.groups()
    if other is not None:
        return other
    return json.dumps(key if quoted is None else quoted, ensure_ascii=False)
