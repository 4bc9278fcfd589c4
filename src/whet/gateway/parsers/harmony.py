"""Turns of several messages, each with a header, as gpt-oss writes them (harmony).

<|channel|>analysis<|message|>Two and three.<|end|><|start|>assistant<|channel|>commentary
to=functions.calculator <|constrain|>json<|message|>{"expression": "2 + 3"}<|call|>

Only the header tells whether a message is thinking, a call or the answer.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from whet.gateway.messages import ToolCall
from whet.gateway.parsers.parser import ParsedOutput, ToolCallFormat, ToolParser, create_call
from whet.gateway.parsers.xml_tags import XmlTagParser

START, MESSAGE = "<|start|>", "<|message|>"
HEADER = (START, "<|channel|>", "<|constrain|>", MESSAGE)
TO = re.compile(r"\bto=([\w.:/-]+)")


@dataclass
class HarmonyParser(ToolParser):
    """Parse turns of messages with headers."""

    format: ToolCallFormat
    ends: Sequence[str]
    """Tokens that end a message."""
    thinking_header: re.Pattern[str]
    """Matches in the header of a message that is thinking."""
    parse_call: Callable[[str, str, Sequence[JsonValue]], ToolCall | None]
    """Parses a call from the name of a tool and the body of the message to it."""
    thinking_block: re.Pattern[str] | None = None
    """Matches thinking and white space in a prompt, if the template drops thinking."""

    def read_recipient(self, header: str) -> str:
        """Name of the tool that a message calls, or "" if it calls none."""
        match = TO.search(header)
        name = match[1].removeprefix("functions.") if match else ""
        return "" if name in ("self", "user", "assistant") else name

    def parse(self, text: str, tools: Sequence[JsonValue] = ()) -> ParsedOutput | None:
        calls: list[ToolCall] = []
        content: list[str] = []
        for header, body in self.split_messages(text):
            name = self.read_recipient(header)
            call = self.parse_call(name, body, tools) if name else None
            if name and call is None:
                return None
            if call is not None:
                calls.append(call)
            elif not self.thinking_header.search(header):
                content.append(body)
        return ParsedOutput("\n".join(content), tuple(calls)) if calls else None

    def split_messages(self, text: str) -> list[tuple[str, str]]:
        """Split a turn into the header and body of each message."""
        found: list[tuple[str, str]] = []
        ends = re.compile("|".join(re.escape(end) for end in (*self.ends, START)))
        while MESSAGE in text:
            header, _, rest = text.partition(MESSAGE)
            end = ends.search(rest)
            found.append((header, rest[: end.start()] if end else rest))
            text = rest[end.end() :] if end else ""
        return found


def _parse_json_call(name: str, body: str, tools: Sequence[JsonValue]) -> ToolCall | None:
    return create_call(name, body.strip())


ATEM_TAGS = XmlTagParser(
    ToolCallFormat(name="atem", template_marks=(), markers=("<atem:invoke",)),
    call=re.compile(r'\s*+<atem:invoke name="([^"\n]++)">\s*+(.*?)</atem:invoke>\s*+', re.DOTALL),
    argument=re.compile(
        r'\s*+<atem:parameter name="([^"\n]++)">(.*?)</atem:parameter>\s*+', re.DOTALL
    ),
)


def _parse_atem_call(name: str, body: str, tools: Sequence[JsonValue]) -> ToolCall | None:
    inside = body.strip().removeprefix("<atem:function_calls>")
    parsed = ATEM_TAGS.parse(inside.removesuffix("</atem:function_calls>"), tools)
    return parsed.calls[0] if parsed and len(parsed.calls) == 1 else None


HARMONY = HarmonyParser(
    ToolCallFormat(
        name="harmony",
        template_marks=("<|channel|>analysis", "<|call|>"),
        special_tokens=(*HEADER, "<|end|>", "<|return|>", "<|call|>"),
    ),
    ends=("<|end|>", "<|return|>", "<|call|>"),
    thinking_header=re.compile(r"<\|channel\|>analysis"),
    parse_call=_parse_json_call,
    thinking_block=re.compile(
        r"<\|channel\|>analysis<\|message\|>.*?<\|end\|><\|start\|>assistant|\s+", re.DOTALL
    ),
)
ATEM = HarmonyParser(
    ToolCallFormat(
        name="atem",
        template_marks=("<atem:invoke", MESSAGE),
        special_tokens=(*HEADER, "<|eom|>", "<|eot|>"),
    ),
    ends=("<|eom|>", "<|eot|>"),
    thinking_header=re.compile(r"\bto=self\b"),
    parse_call=_parse_atem_call,
)
