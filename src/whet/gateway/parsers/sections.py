"""Tool calls in a section between special tokens, as DeepSeek, Kimi and Solar write them.

DeepSeek V3 and R1 (the real bars are full-width, the spaces U+2581):
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
Solar:
    <|tool_calls|><|tool_call:begin|>a1b2c3<|tool_call:name|>calculator
    <|tool_call:args|>{"expression": "2 + 3"}<|tool_call:end|>
functionary 3.1:
    <function=calculator>{"expression": "2 + 3"}</function>
functionary 3.2, where the prompt ends with >>>:
    all
    Let me see.>>>calculator
    {"expression": "2 + 3"}
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from whet.gateway.parsers.parser import (
    ParsedOutput,
    ToolCallFormat,
    ToolParser,
    create_call,
    match_all,
    require_all,
    strip_fence,
)


@dataclass
class SectionParser(ToolParser):
    """Parse a section of calls. Text after the section is not part of the message."""

    format: ToolCallFormat
    close: str
    """End of the section, which starts with the format's marker; "" if the turn ends it."""
    call: re.Pattern[str]
    """One call, with the groups `name`, `arguments` and perhaps `id`. Its start may be a second
    marker of the format: some models leave out the start of the section."""

    def parse(self, text: str, tools: Sequence[JsonValue] = ()) -> ParsedOutput | None:
        starts = [at for marker in self.format.markers if (at := text.find(marker)) >= 0]
        if not starts:
            return None
        before, after = text[: min(starts)], text[min(starts) :]
        after = after.removeprefix(self.format.markers[0])
        section = after.partition(self.close)[0] if self.close else after
        matches = match_all(self.call, section) or []
        calls = require_all(
            [
                create_call(m["name"], strip_fence(m["arguments"]), m.groupdict().get("id") or "")
                for m in matches
            ]
        )
        return ParsedOutput(before.rstrip(), calls) if calls else None


@dataclass
class RecipientParser(ToolParser):
    """Parse messages that each start with the name of a recipient, in a line of its own."""

    format: ToolCallFormat
    header: re.Pattern[str]
    """The start of a message, with the recipient as group 1."""
    user: str
    """The recipient of content."""

    def parse(self, text: str, tools: Sequence[JsonValue] = ()) -> ParsedOutput | None:
        marker = self.format.markers[0]
        text = marker + text.removeprefix(marker)  # the prompt ends with the first one
        headers = [*self.header.finditer(text)]
        if not headers or headers[0].start() > 0:
            return None
        ends = [*(header.start() for header in headers[1:]), len(text)]
        bodies = [text[h.end() : end].strip() for h, end in zip(headers, ends, strict=True)]
        messages = [(h[1], body) for h, body in zip(headers, bodies, strict=True)]
        content = [body for recipient, body in messages if recipient == self.user]
        calls = require_all([create_call(r, body) for r, body in messages if r != self.user])
        return ParsedOutput("\n".join(content), calls) if calls else None


def _format_deepseek_token(words: str) -> str:
    return f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")


def _build_section_format(name: str, begin: str, *tokens: str) -> ToolCallFormat:
    return ToolCallFormat(
        name, template_marks=(begin,), markers=(begin,), special_tokens=(begin, *tokens)
    )


CALL, CALL_END, SEP = (
    _format_deepseek_token(w) for w in ("tool call begin", "tool call end", "tool sep")
)
CALLS, CALLS_END = (
    _format_deepseek_token("tool calls begin"),
    _format_deepseek_token("tool calls end"),
)
DEEPSEEK = SectionParser(
    _build_section_format("deepseek", CALLS, CALLS_END, CALL, CALL_END, SEP),
    close=CALLS_END,
    call=re.compile(
        rf"\s*+{CALL}(?:function{SEP})?+(?P<name>[^\s<]++)(?:{SEP})?+"
        rf"(?P<arguments>.*?){CALL_END}\s*+",
        re.DOTALL,
    ),
)
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL = "<|tool_call_begin|>"
KIMI = SectionParser(
    ToolCallFormat(
        "kimi",
        template_marks=(KIMI_BEGIN,),
        markers=(KIMI_BEGIN, KIMI_CALL),
        special_tokens=(
            *(KIMI_BEGIN, KIMI_END, KIMI_CALL),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
    ),
    close=KIMI_END,
    call=re.compile(
        r"\s*+<\|tool_call_begin\|>\s*+(?P<id>(?:functions\.)?(?P<name>[^\s<:]++)(?::\d++)?+)\s*+"
        r"<\|tool_call_argument_begin\|>(?P<arguments>.*?)"
        r"(?:<\|tool_call_end\|>|(?=<\|tool_call_begin\|>)|\Z)\s*+",
        re.DOTALL,
    ),
)
SOLAR = SectionParser(
    _build_section_format(
        "solar",
        "<|tool_calls|>",
        "<|tool_call:begin|>",
        "<|tool_call:name|>",
        "<|tool_call:args|>",
        "<|tool_call:end|>",
    ),
    close="",
    call=re.compile(
        r"\s*+<\|tool_call:begin\|>(?P<id>[^<]*+)<\|tool_call:name\|>(?P<name>[^\s<]++)"
        r"<\|tool_call:args\|>(?P<arguments>.*?)<\|tool_call:end\|>\s*+",
        re.DOTALL,
    ),
)
FUNCTIONARY = SectionParser(
    ToolCallFormat("functionary", template_marks=("<function=",), markers=("<function=",)),
    close="",
    call=re.compile(
        r"\s*+(?:<function=)?+(?P<name>[^\s<>{]++)>(?P<arguments>\{.*?\})</function>\s*+", re.DOTALL
    ),
)
FUNCTIONARY_32 = RecipientParser(
    ToolCallFormat(
        "functionary_3_2",
        template_marks=(">>>all",),
        markers=(">>>",),
        content_prefix="all\n",
    ),
    header=re.compile(r">>>([\w.:/-]++)\n"),
    user="all",
)
