"""Turns made of messages with headers, each to a channel or a reader, as gpt-oss writes (harmony).

<|channel|>analysis<|message|>Two and three.<|end|><|start|>assistant<|channel|>commentary
to=functions.calculator <|constrain|>json<|message|>{"expression": "2 + 3"}<|call|>

Thinking, calls and the answer are told apart by the header alone.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from whet.gateway.messages import ToolCall
from whet.gateway.parsers.parser import Format, Parsed, ToolParser, mint
from whet.gateway.parsers.tagged import TaggedParser

START, MESSAGE = "<|start|>", "<|message|>"
HEADER = (START, "<|channel|>", "<|constrain|>", MESSAGE)
TO = re.compile(r"\bto=([\w.:/-]+)")


@dataclass
class HeadedParser(ToolParser):
    """A format given by its headers and the tokens that end a message."""

    format: Format
    ends: Sequence[str]
    thinks: re.Pattern[str]
    """In the header of a message that is thinking."""
    body: Callable[[str, str, Sequence[JsonValue]], ToolCall | None]
    """The call that a message to a tool makes, from the tool's name and the message."""

    def recipient(self, header: str) -> str:
        """The tool a message goes to, or "" if it is for the user or for the model itself."""
        match = TO.search(header)
        name = match[1].removeprefix("functions.") if match else ""
        return "" if name in ("self", "user", "assistant") else name

    def parse(self, text: str, tools: Sequence[JsonValue] = ()) -> Parsed | None:
        calls: list[ToolCall] = []
        content: list[str] = []
        for header, body in self.messages(text):
            name = self.recipient(header)
            call = self.body(name, body, tools) if name else None
            if name and call is None:
                return None
            if call is not None:
                calls.append(call)
            elif not self.thinks.search(header):
                content.append(body)
        return Parsed("\n".join(content), tuple(calls)) if calls else None

    def messages(self, text: str) -> list[tuple[str, str]]:
        """The messages of a turn, each as its header and its body."""
        found: list[tuple[str, str]] = []
        ends = re.compile("|".join(re.escape(end) for end in (*self.ends, START)))
        while MESSAGE in text:
            header, _, rest = text.partition(MESSAGE)
            end = ends.search(rest)
            found.append((header, rest[: end.start()] if end else rest))
            text = rest[end.end() :] if end else ""
        return found


def _json_body(name: str, body: str, tools: Sequence[JsonValue]) -> ToolCall | None:
    return mint(name, body.strip())


ATEM_TAGS = TaggedParser(
    Format(name="atem", marks=(), markers=("<atem:invoke",)),
    call=re.compile(r'\s*+<atem:invoke name="([^"\n]++)">\s*+(.*?)</atem:invoke>\s*+', re.DOTALL),
    argument=re.compile(
        r'\s*+<atem:parameter name="([^"\n]++)">(.*?)</atem:parameter>\s*+', re.DOTALL
    ),
)


def _atem_body(name: str, body: str, tools: Sequence[JsonValue]) -> ToolCall | None:
    inside = body.strip().removeprefix("<atem:function_calls>")
    parsed = ATEM_TAGS.parse(inside.removesuffix("</atem:function_calls>"), tools)
    return parsed.calls[0] if parsed and len(parsed.calls) == 1 else None


HARMONY = HeadedParser(
    Format(
        name="harmony",
        marks=("<|channel|>analysis", "<|call|>"),
        tokens=(*HEADER, "<|end|>", "<|return|>", "<|call|>"),
    ),
    ends=("<|end|>", "<|return|>", "<|call|>"),
    thinks=re.compile(r"<\|channel\|>analysis"),
    body=_json_body,
)
ATEM = HeadedParser(
    Format(
        name="atem",
        marks=("<atem:invoke", MESSAGE),
        tokens=(*HEADER, "<|eom|>", "<|eot|>"),
    ),
    ends=("<|eom|>", "<|eot|>"),
    thinks=re.compile(r"\bto=self\b"),
    body=_atem_body,
)
