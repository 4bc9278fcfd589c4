"""Tool calls as bare JSON, as Llama 3 writes them: {"name": "calculator", "parameters": {...}}."""

from collections.abc import Sequence

from pydantic import JsonValue

from whet.gateway.parsers.parser import (
    ParsedOutput,
    ToolCallFormat,
    ToolParser,
    parse_json_call,
    require_all,
    split_objects,
)

TAG = "<|python_tag|>"


class LlamaParser(ToolParser):
    """Parse JSON objects separated by semicolons, which are the whole text or follow a tag."""

    format = ToolCallFormat(
        name="llama3_json",
        template_marks=('"parameters": ', "ipython"),
        markers=(TAG,),
        starts=("{",),
        special_tokens=(TAG,),
    )

    def parse(self, text: str, tools: Sequence[JsonValue] = ()) -> ParsedOutput | None:
        before, tag, after = text.partition(TAG)
        content, body = (before.rstrip(), after) if tag else ("", text)
        objects = split_objects(body) or []
        calls = require_all([parse_json_call(o, ("parameters", "arguments")) for o in objects])
        return ParsedOutput(content, calls) if calls else None
