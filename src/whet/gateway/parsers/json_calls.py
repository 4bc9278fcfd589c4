"""Tool calls as JSON objects after a tag, as Qwen, the tiny model and many others write them.

<tool_call>
{"name": "calculator", "arguments": {"expression": "2 + 3"}}
</tool_call>

The families differ in the tags, in the keys, and in whether the objects stand in a list.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import JsonValue

from whet.gateway.messages import ToolCall
from whet.gateway.parsers.parser import (
    ParsedOutput,
    ToolCallFormat,
    ToolParser,
    load_object,
    match_all,
    new_call,
    parse_json_call,
    require_all,
    split_objects,
    strip_fence,
)


@dataclass
class JsonCallParser(ToolParser):
    """Parse JSON calls between two tags; only white space may stand between or after them."""

    format: ToolCallFormat
    close: str = ""
    """End of the calls that the format's marker opens; "" if they end with the turn."""
    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str = "id"
    named_by_key: bool = False
    """Whether the name of a tool is the key of its arguments: {"calculator": {...}}."""
    may_be_open: bool = False
    """Whether the end of the turn may stand for the end of the calls."""

    def parse(self, text: str, tools: Sequence[JsonValue] = ()) -> ParsedOutput | None:
        markers = [marker for marker in self.format.markers if marker in text]
        open = min(markers, key=text.find, default=self.format.markers[0])
        before, found, after = text.partition(open)
        bodies: list[str] | None = [after] if found else None
        if self.close:
            end = re.escape(self.close) + (r"|\Z" if self.may_be_open else "")
            between = re.compile(rf"\s*+{re.escape(open)}(.*?)(?:{end})\s*+", re.DOTALL)
            matches = match_all(between, text[len(before) :])
            bodies = [match[1] for match in matches] if matches else None
        objects = [split_objects(strip_fence(body)) or [""] for body in bodies or []]
        calls = require_all([self._parse_call(body) for found in objects for body in found])
        return ParsedOutput(before.rstrip(), calls) if calls else None

    def _parse_call(self, body: str) -> ToolCall | None:
        if not self.named_by_key:
            return parse_json_call(body, (self.arguments_key,), self.name_key, self.id_key)
        value = load_object(body)
        if value is None or len(value) != 1:
            return None
        [(name, arguments)] = value.items()
        return new_call(name, json.dumps(arguments, ensure_ascii=False))


def _tags(name: str, open: str, close: str = "", marks: Sequence[str] = ()) -> ToolCallFormat:
    """A format with tags around the calls; `marks` are in the template, if `open` is not."""
    tags = tuple(tag for tag in (open, close) if tag)
    return ToolCallFormat(name, marks or (open,), markers=(open,), special_tokens=tags)


HERMES = JsonCallParser(_tags("hermes", "<tool_call>", "</tool_call>"), "</tool_call>")
TOOL_CALLS = JsonCallParser(
    replace(
        _tags("tool_calls", "<tool_calls>", "</tool_calls>"), content_tags=("[END FINAL RESPONSE]",)
    ),
    "</tool_calls>",
)
"""Apriel in a list, MiniMax M1 line by line."""
NEMOTRON_V2 = JsonCallParser(_tags("nemotron_v2", "<TOOLCALL>", "</TOOLCALL>"), "</TOOLCALL>")
GRANITE = JsonCallParser(
    replace(
        _tags("granite", "<|tool_call|>"),
        markers=("<|tool_call|>", "<tool_call>"),
        content_tags=("<response>", "</response>"),
    )
)
GIGACHAT3 = JsonCallParser(
    _tags("gigachat3", "function call<|role_sep|>\n", marks=("'function call'", "<|role_sep|>"))
)
GIGACHAT31 = JsonCallParser(_tags("gigachat3_1", "<|function_call|>"))
APERTUS = JsonCallParser(
    _tags("apertus", "<|tools_prefix|>", "<|tools_suffix|>"),
    "<|tools_suffix|>",
    named_by_key=True,
    may_be_open=True,
)
COHERE = JsonCallParser(
    _tags("cohere", "<|START_ACTION|>", "<|END_ACTION|>"),
    "<|END_ACTION|>",
    name_key="tool_name",
    arguments_key="parameters",
    id_key="tool_call_id",
)
COMMAND_R = JsonCallParser(
    _tags("command_r", "Action:", marks=("Action:", "```json", '"tool_name"')),
    name_key="tool_name",
    arguments_key="parameters",
)
"""A list in a code fence, as Command R and R+ write it."""
FUNCTOOLS = JsonCallParser(_tags("functools", "functools"))
"""FireFunction and Phi 4 mini."""
JSON_CALLS = (
    *(TOOL_CALLS, NEMOTRON_V2, GRANITE, GIGACHAT31, GIGACHAT3, APERTUS, COHERE),
    *(COMMAND_R, FUNCTOOLS),
)
