"""Tool calls after a special token, as Mistral writes them in an older and a newer form.

[TOOL_CALLS][{"name": "calculator", "arguments": {"expression": "2 + 3"}}]
[TOOL_CALLS]calculator[ARGS]{"expression": "2 + 3"}
"""

import re
from collections.abc import Sequence

from pydantic import JsonValue

from whet.gateway.messages import ToolCall
from whet.gateway.parsers.parser import (
    ParsedOutput,
    ToolCallFormat,
    ToolParser,
    new_call,
    parse_json_call,
    require_all,
    split_objects,
)

TOKEN = "[TOOL_CALLS]"
NAMED = re.compile(
    r"\s*+([^\s\[{]++)(?:\[CALL_ID\]([^\[\s{]*+))?+(?:\[ARGS\])?+\s*+(\{.*)", re.DOTALL
)


class MistralParser(ToolParser):
    """Parse everything after the token as calls."""

    format = ToolCallFormat(
        name="mistral",
        template_marks=(TOKEN,),
        markers=(TOKEN,),
        special_tokens=(TOKEN, "[ARGS]", "[CALL_ID]"),
    )

    def parse(self, text: str, tools: Sequence[JsonValue] = ()) -> ParsedOutput | None:
        before, found, after = text.partition(TOKEN)
        if not found:
            return None
        calls: list[ToolCall | None] = []
        for body in after.split(TOKEN):
            if body.lstrip().startswith("["):
                calls += [parse_json_call(text) for text in split_objects(body) or [""]]
            else:
                calls.append(_parse_named(body))
        valid = require_all(calls)
        return ParsedOutput(before.rstrip(), valid) if valid else None


def _parse_named(body: str) -> ToolCall | None:
    match = NAMED.fullmatch(body)
    return new_call(match[1], match[3].strip(), match[2] or "") if match else None
