"""Tool calls in Gemma 4's own notation: bare keys, and strings between special tokens.

<|tool_call>call:calculator{expression:<|"|>2 + 3<|"|>}<tool_call|>
"""

import json
import re
from collections.abc import Sequence

from pydantic import JsonValue

from whet.gateway.parsers.parser import (
    ParsedOutput,
    ToolCallFormat,
    ToolParser,
    create_call,
    match_all,
    require_all,
)

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
CALL = re.compile(r"\s*+<\|tool_call>call:([^\s{]++)(\{.*?\})<tool_call\|>\s*+", re.DOTALL)
LEXEME = re.compile(r'<\|"\|>(.*?)<\|"\|>|([A-Za-z_][\w.-]*+)(?=\s?:)|([^<\w]|\w++|<)', re.DOTALL)
"""A string, a bare key, or anything else, which is JSON already."""


class GemmaParser(ToolParser):
    """Parse Gemma calls; only white space may stand between or after them."""

    format = ToolCallFormat(
        name="gemma4",
        template_marks=("<|tool_call>call:",),
        markers=(OPEN,),
        special_tokens=(OPEN, CLOSE, QUOTE),
    )

    def parse(self, text: str, tools: Sequence[JsonValue] = ()) -> ParsedOutput | None:
        before, _, _ = text.partition(OPEN)
        matches = match_all(CALL, text[len(before) :]) or []
        calls = require_all([create_call(m[1], LEXEME.sub(_to_json, m[2])) for m in matches])
        return ParsedOutput(before.rstrip(), calls) if calls else None


def _to_json(lexeme: re.Match[str]) -> str:
    quoted, key, other = lexeme.groups()
    if other is not None:
        return other
    return json.dumps(key if quoted is None else quoted, ensure_ascii=False)
