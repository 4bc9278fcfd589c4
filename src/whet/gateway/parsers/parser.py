"""The protocol of tool-call parsers and the helpers they share.

A format is a parser with its description: JSON objects (`json_calls.py`), one tag per argument
(`xml_tags.py`), sections between tokens (`sections.py`) or Python calls (`pythonic.py`) with other
tags, or a class of its own. All are listed in `PARSERS` of `formats.py`.
"""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pydantic import JsonValue

from whet.gateway.messages import ToolCall, parse_json

NAME = re.compile(r"[\w.:/-]{1,256}")
"""Valid names of tools. Markup in a name is invalid: it would come back in the next prompt."""


class ParsedOutput(NamedTuple):
    """Tool calls and the text beside them."""

    content: str
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """Static description of a tool-call format."""

    name: str
    template_marks: Sequence[str]
    """Texts that are all in the chat template of a model with this format."""
    markers: Sequence[str] = ()
    """Text from one of these on may be a call, so a stream holds it back until the end."""
    starts: Sequence[str] = ()
    """As `markers`, but only at the very start of the text."""
    special_tokens: Sequence[str] = ()
    """Special tokens that `parse` needs; all others are removed before."""
    content_tags: Sequence[str] = ()
    """Tags around content, which are not part of it."""
    content_prefix: str = ""
    """Text with which a turn starts if it starts with content; otherwise it starts with a call."""


class ToolParser(Protocol):
    """Parse tool calls in the text of a model."""

    format: ToolCallFormat

    def parse(self, text: str, tools: Sequence[JsonValue] = ()) -> ParsedOutput | None:
        """Return the calls in a text, or None if there are none or any of them is malformed.

        Never raises. `tools` are the request's, for formats whose arguments are not typed.
        """
        ...


class NoParser(ToolParser):
    """For models whose tool calls are in no known format: all output is content."""

    format = ToolCallFormat("none", template_marks=())

    def parse(self, text: str, tools: Sequence[JsonValue] = ()) -> ParsedOutput | None:
        return None


def create_call(name: str, arguments: str, model_id: str = "") -> ToolCall | None:
    """Create a call with a new id, or None if its name or arguments are invalid.

    `model_id` is the id that the model wrote, if any.
    """
    if NAME.fullmatch(name) is None or load_object(arguments) is None:
        return None
    valid = model_id if NAME.fullmatch(model_id) else ""
    return ToolCall(f"call_{secrets.token_hex(12)}", name, arguments, valid)


def require_all(calls: Sequence[ToolCall | None]) -> tuple[ToolCall, ...] | None:
    """Return the calls, or None if there are none or one of them is malformed."""
    valid = tuple(call for call in calls if call is not None)
    return valid if valid and len(valid) == len(calls) else None


def match_all(pattern: re.Pattern[str], text: str) -> list[re.Match[str]] | None:
    """Return consecutive matches that cover the whole text, or None if it has anything else."""
    matches: list[re.Match[str]] = []
    position = 0
    while position < len(text):
        match = pattern.match(text, position)
        if match is None:
            return None
        matches.append(match)
        position = match.end()
    return matches


def load_object(text: str) -> dict[str, JsonValue] | None:
    """Parse a JSON object, or return None if the text is anything else."""
    try:
        value = parse_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def dump_arguments(values: dict[str, JsonValue]) -> str:
    """Serialize arguments as JSON, for formats in which they are not written as JSON."""
    return json.dumps(values, ensure_ascii=False)


def strip_fence(text: str) -> str:
    """Remove the code fence that some models put around JSON."""
    return text.strip().removeprefix("```json").removesuffix("```").strip()
