"""Tool calls as JSON objects, as most models write them.

Qwen, the tiny model and many others, with other tags and keys, one by one or in a list:
    <tool_call>
    {"name": "calculator", "arguments": {"expression": "2 + 3"}}
    </tool_call>
Llama 3:
    {"name": "calculator", "parameters": {"expression": "2 + 3"}}
Mistral, in an older and a newer form:
    [TOOL_CALLS][{"name": "calculator", "arguments": {"expression": "2 + 3"}}]
    [TOOL_CALLS]calculator[ARGS]{"expression": "2 + 3"}
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
    create_call,
    load_object,
    match_all,
    require_all,
    strip_fence,
)

JSON_DECODER = json.JSONDecoder()
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS_TOKEN = "[TOOL_CALLS]"
NAMED_CALL = re.compile(
    r"\s*+([^\s\[{]++)(?:\[CALL_ID\]([^\[\s{]*+))?+(?:\[ARGS\])?+\s*+(\{.*)", re.DOTALL
)
"""A call of Mistral's newer form: its name, perhaps an id, its arguments."""


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
        return create_call(name, json.dumps(arguments, ensure_ascii=False))


class LlamaParser(ToolParser):
    """Parse JSON objects separated by semicolons, which are the whole text or follow a tag."""

    format = ToolCallFormat(
        name="llama3_json",
        template_marks=('"parameters": ', "ipython"),
        markers=(PYTHON_TAG,),
        starts=("{",),
        special_tokens=(PYTHON_TAG,),
    )

    def parse(self, text: str, tools: Sequence[JsonValue] = ()) -> ParsedOutput | None:
        before, tag, after = text.partition(PYTHON_TAG)
        content, body = (before.rstrip(), after) if tag else ("", text)
        objects = split_objects(body) or []
        calls = require_all([parse_json_call(o, ("parameters", "arguments")) for o in objects])
        return ParsedOutput(content, calls) if calls else None


class MistralParser(ToolParser):
    """Parse everything after the token as calls."""

    format = ToolCallFormat(
        name="mistral",
        template_marks=(TOOL_CALLS_TOKEN,),
        markers=(TOOL_CALLS_TOKEN,),
        special_tokens=(TOOL_CALLS_TOKEN, "[ARGS]", "[CALL_ID]"),
    )

    def parse(self, text: str, tools: Sequence[JsonValue] = ()) -> ParsedOutput | None:
        before, found, after = text.partition(TOOL_CALLS_TOKEN)
        if not found:
            return None
        calls: list[ToolCall | None] = []
        for body in after.split(TOOL_CALLS_TOKEN):
            if body.lstrip().startswith("["):
                calls += [parse_json_call(text) for text in split_objects(body) or [""]]
            else:
                calls.append(_parse_named(body))
        valid = require_all(calls)
        return ParsedOutput(before.rstrip(), valid) if valid else None


def _parse_named(body: str) -> ToolCall | None:
    match = NAMED_CALL.fullmatch(body)
    return create_call(match[1], match[3].strip(), match[2] or "") if match else None


def split_objects(text: str) -> list[str] | None:
    """Split a JSON list of objects, or objects one after the other, into their texts.

    So that arguments stay as the model wrote them. None if the text is anything else.
    """
    text = text.strip()
    in_list = text.startswith("[")
    if in_list and not text.endswith("]"):
        return None
    separator, rest = (",", text[1:-1].strip()) if in_list else (";", text)
    objects: list[str] = []
    while rest:
        try:
            _, end = JSON_DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        objects.append(rest[:end])
        rest = rest[end:].lstrip()
        if in_list and rest and (not rest.startswith(separator) or rest == separator):
            return None
        rest = rest.removeprefix(separator).lstrip()
    return objects


def parse_json_call(
    body: str,
    keys: Sequence[str] = ("arguments",),
    name_key: str = "name",
    id_key: str = "id",
) -> ToolCall | None:
    """Parse an object of a name, arguments under the first of `keys` found, and perhaps an id."""
    value = load_object(body)
    if value is None:
        return None
    key = next((key for key in keys if key in value), None)
    name, arguments = value.get(name_key), value.get(key) if key else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    assert key is not None
    if not value.keys() <= {name_key, key, id_key}:
        return None
    id = value.get(id_key)
    return create_call(name, _slice_value(body, key, arguments), id if isinstance(id, str) else "")


def _slice_value(body: str, key: str, value: JsonValue) -> str:
    """Text of a key's value as the model wrote it, or plain JSON where it cannot be found."""
    for match in re.finditer(rf'"{key}"\s*:\s*', body):
        try:
            found, end = JSON_DECODER.raw_decode(body, match.end())
        except (ValueError, RecursionError):
            continue
        if found == value:  # not a key of the same name deeper in the object
            return body[match.end() : end]
    return json.dumps(value, ensure_ascii=False)


def _build_tag_format(
    name: str, open: str, close: str = "", marks: Sequence[str] = ()
) -> ToolCallFormat:
    """A format with tags around the calls; `marks` are in the template, if `open` is not."""
    tags = tuple(tag for tag in (open, close) if tag)
    return ToolCallFormat(name, marks or (open,), markers=(open,), special_tokens=tags)


HERMES = JsonCallParser(_build_tag_format("hermes", "<tool_call>", "</tool_call>"), "</tool_call>")
TOOL_CALLS = JsonCallParser(
    replace(
        _build_tag_format("tool_calls", "<tool_calls>", "</tool_calls>"),
        content_tags=("[END FINAL RESPONSE]",),
    ),
    "</tool_calls>",
)
"""Apriel in a list, MiniMax M1 line by line."""
NEMOTRON_V2 = JsonCallParser(
    _build_tag_format("nemotron_v2", "<TOOLCALL>", "</TOOLCALL>"), "</TOOLCALL>"
)
GRANITE = JsonCallParser(
    replace(
        _build_tag_format("granite", "<|tool_call|>"),
        markers=("<|tool_call|>", "<tool_call>"),
        content_tags=("<response>", "</response>"),
    )
)
GIGACHAT3 = JsonCallParser(
    _build_tag_format(
        "gigachat3", "function call<|role_sep|>\n", marks=("'function call'", "<|role_sep|>")
    )
)
GIGACHAT31 = JsonCallParser(_build_tag_format("gigachat3_1", "<|function_call|>"))
APERTUS = JsonCallParser(
    _build_tag_format("apertus", "<|tools_prefix|>", "<|tools_suffix|>"),
    "<|tools_suffix|>",
    named_by_key=True,
    may_be_open=True,
)
COHERE = JsonCallParser(
    _build_tag_format("cohere", "<|START_ACTION|>", "<|END_ACTION|>"),
    "<|END_ACTION|>",
    name_key="tool_name",
    arguments_key="parameters",
    id_key="tool_call_id",
)
COMMAND_R = JsonCallParser(
    _build_tag_format("command_r", "Action:", marks=("Action:", "```json", '"tool_name"')),
    name_key="tool_name",
    arguments_key="parameters",
)
"""A list in a code fence, as Command R and R+ write it."""
FUNCTOOLS = JsonCallParser(_build_tag_format("functools", "functools"))
"""FireFunction and Phi 4 mini."""
JSON_CALLS = (
    *(TOOL_CALLS, NEMOTRON_V2, GRANITE, GIGACHAT31, GIGACHAT3, APERTUS, COHERE),
    *(COMMAND_R, FUNCTOOLS),
)
