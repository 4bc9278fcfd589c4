"""Calls as bare JSON, which Llama 3 writes: {"name": "calculator", "parameters": {...}}."""

import json
from collections.abc import Sequence

from pydantic import JsonValue

from whet.gateway.messages import ToolCall
from whet.gateway.parsers.parser import Format, Parsed, ToolParser, all_calls, json_call

TAG = "<|python_tag|>"


class LlamaParser(ToolParser):
    """The whole text is one object, or several with semicolons between, perhaps after a tag."""

    format = Format(
        name="llama3_json",
        marks=('"parameters": ', "ipython"),
        markers=(TAG,),
        starts=("{",),
        tokens=(TAG,),
    )

    def parse(self, text: str, tools: Sequence[JsonValue] = ()) -> Parsed | None:
        before, tag, after = text.partition(TAG)
        content, body = (before.rstrip(), after) if tag else ("", text)
        calls = _calls(body.strip())
        return Parsed(content, calls) if calls else None


def _calls(text: str) -> tuple[ToolCall, ...] | None:
    calls: list[ToolCall | None] = []
    decoder = json.JSONDecoder()
    while text:
        try:
            _, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return None
        calls.append(json_call(text[:end], ("parameters", "arguments")))
        text = text[end:].lstrip().removeprefix(";").lstrip()
    return all_calls(calls)
