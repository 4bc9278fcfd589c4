"""What a tool-call format is, and what all of them share.

A new format is one class with a `format` and `parse`, listed in `PARSERS`.
"""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pydantic import JsonValue

from whet.gateway import strictjson
from whet.gateway.messages import ToolCall

NAME = re.compile(r"[\w.:/-]{1,256}")
"""What may name a tool. Markup in a name is no name: it would come back in the next prompt."""


class Parsed(NamedTuple):
    """The text beside the calls, and the calls."""

    content: str
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class Format:
    """What is known of a tool-call format before anything is read."""

    name: str
    marks: Sequence[str]
    """A template that contains all of these makes its model write this format."""
    markers: Sequence[str] = ()
    """From here on the text may be a call, so a stream keeps it back until it is whole."""
    starts: Sequence[str] = ()
    """As `markers`, but only at the very beginning of the text."""
    tokens: Sequence[str] = ()
    """Special tokens that `parse` must see; all others are taken out before."""


class ToolParser(Protocol):
    """Finds the tool calls in what a model wrote."""

    format: Format

    def parse(self, text: str, tools: Sequence[JsonValue] = ()) -> Parsed | None:
        """The calls in a text; None if there are none, or if anything about them is malformed.

        Never raises. `tools` are the request's, for formats whose arguments have no types.
        """
        ...


def mint(name: str, arguments: str) -> ToolCall | None:
    """A call under an id that no other call has, or None if it cannot be one."""
    if NAME.fullmatch(name) is None or load_object(arguments) is None:
        return None
    return ToolCall(f"call_{secrets.token_hex(12)}", name, arguments)


def all_calls(calls: Sequence[ToolCall | None]) -> tuple[ToolCall, ...] | None:
    """The calls, or None if there are none or one of them is malformed."""
    good = tuple(call for call in calls if call is not None)
    return good if good and len(good) == len(calls) else None


def load_object(text: str) -> dict[str, JsonValue] | None:
    """A JSON object, or None if the text is none."""
    try:
        value = strictjson.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def dump_arguments(values: dict[str, JsonValue]) -> str:
    """Arguments as JSON text, for formats in which they are not written as JSON."""
    return json.dumps(values, ensure_ascii=False)


def cut_value(body: str, key: str, value: JsonValue) -> str:
    """The text of a key's value as the model wrote it, or plain JSON where it cannot be cut out."""
    decoder = json.JSONDecoder()
    for match in re.finditer(rf'"{key}"\s*:\s*', body):
        try:
            found, end = decoder.raw_decode(body, match.end())
        except (ValueError, RecursionError):
            continue
        if found == value:
            return body[match.end() : end]
    return json.dumps(value, ensure_ascii=False)


def json_call(body: str, keys: Sequence[str] = ("arguments",)) -> ToolCall | None:
    """A call written as an object of a name and its arguments, under the first of `keys` found."""
    value = load_object(body)
    if value is None:
        return None
    key = next((key for key in keys if key in value), None)
    name, arguments = value.get("name"), value.get(key) if key else None
    if not isinstance(name, str) or not isinstance(arguments, dict) or len(value) != 2:
        return None
    assert key is not None
    return mint(name, cut_value(body, key, arguments))


def typed(text: str, name: str, key: str, tools: Sequence[JsonValue]) -> JsonValue:
    """An argument that was written without quotes: of the type its tool declares.

    Where nothing is declared it is JSON if it reads as JSON, and text otherwise.
    """
    declared = _declared(name, key, tools)
    if declared == "string":
        return text
    try:
        return strictjson.loads(text)
    except ValueError:
        return text


def _declared(name: str, key: str, tools: Sequence[JsonValue]) -> JsonValue:
    for tool in tools:
        match tool:
            case {"function": {"name": found, "parameters": {"properties": dict(properties)}}}:
                declared = properties.get(key)
                if found == name and isinstance(declared, dict):
                    return declared.get("type")
            case _:
                pass
    return None
