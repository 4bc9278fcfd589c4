"""Calls in a section of their own between special tokens, as DeepSeek and Kimi write.

DeepSeek V3 and R1 (its bars are full-width and its gaps are U+2581):
    <|tool calls begin|><|tool call begin|>function<|tool sep|>calculator
    ```json
    {"expression": "2 + 3"}
    ```<|tool call end|><|tool calls end|>
DeepSeek V3.1:
    <|tool calls begin|><|tool call begin|>calculator<|tool sep|>{"expression": "2 + 3"}
    <|tool call end|><|tool calls end|>
Kimi K2:
    <|tool_calls_section_begin|><|tool_call_begin|>functions.calculator:0
    <|tool_call_argument_begin|>{"expression": "2 + 3"}<|tool_call_end|>
    <|tool_calls_section_end|>
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from whet.gateway.messages import ToolCall
from whet.gateway.parsers.parser import (
    Format,
    Parsed,
    ToolParser,
    all_calls,
    mint,
)


@dataclass
class SectionedParser(ToolParser):
    """A format given by its tokens. What follows the section is not part of the message."""

    format: Format
    close: str
    """The end of the section, which begins with the format's marker."""
    call: re.Pattern[str]
    """One call: its name and its arguments."""

    def parse(self, text: str, tools: Sequence[JsonValue] = ()) -> Parsed | None:
        before, found, after = text.partition(self.format.markers[0])
        if not found:
            return None
        section = after.partition(self.close)[0]
        calls: list[ToolCall | None] = []
        position = 0
        while position < len(section):
            match = self.call.match(section, position)
            if match is None:
                return None
            arguments = match["arguments"].strip()
            arguments = arguments.removeprefix("```json").removesuffix("```").strip()
            calls.append(mint(match["name"], arguments))
            position = match.end()
        made = all_calls(calls)
        return Parsed(before.rstrip(), made) if made else None


def _deepseek(words: str) -> str:
    return f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")


def _section(name: str, begin: str, *tokens: str) -> Format:
    return Format(name, marks=(begin,), markers=(begin,), tokens=(begin, *tokens))


CALL, CALL_END, SEP = (_deepseek(w) for w in ("tool call begin", "tool call end", "tool sep"))
CALLS, CALLS_END = _deepseek("tool calls begin"), _deepseek("tool calls end")
DEEPSEEK = SectionedParser(
    _section("deepseek", CALLS, CALLS_END, CALL, CALL_END, SEP),
    close=CALLS_END,
    call=re.compile(
        rf"\s*+{CALL}(?:function{SEP})?+(?P<name>[^\s<]++)(?:{SEP})?+"
        rf"(?P<arguments>.*?){CALL_END}\s*+",
        re.DOTALL,
    ),
)
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI = SectionedParser(
    _section(
        "kimi",
        KIMI_BEGIN,
        KIMI_END,
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    close=KIMI_END,
    call=re.compile(
        r"\s*+<\|tool_call_begin\|>\s*+(?:functions\.)?+(?P<name>[^\s<:]++)(?::\d++)?+\s*+"
        r"<\|tool_call_argument_begin\|>(?P<arguments>.*?)<\|tool_call_end\|>\s*+",
        re.DOTALL,
    ),
)
