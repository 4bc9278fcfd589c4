"""Calls as nested tags, one for each argument, as Qwen3-Coder, Qwen3.5, Nemotron and GLM write.

Qwen:
    <tool_call>
    <function=calculator>
    <parameter=expression>
    2 + 3
    </parameter>
    </function>
    </tool_call>
GLM:
    <tool_call>calculator
    <arg_key>expression</arg_key>
    <arg_value>2 + 3</arg_value>
    </tool_call>

The values carry no types: the tool's schema says what they are.
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
    dump_arguments,
    mint,
    typed,
)


@dataclass
class TaggedParser(ToolParser):
    """A format given by two patterns. Nothing else may stand between or after the calls."""

    format: Format
    call: re.Pattern[str]
    """One call: its name and the text of its arguments."""
    argument: re.Pattern[str]
    """One argument: its name and its value."""

    def parse(self, text: str, tools: Sequence[JsonValue] = ()) -> Parsed | None:
        begins = [at for marker in self.format.markers if (at := text.find(marker)) >= 0]
        if not begins:
            return None
        calls: list[ToolCall | None] = []
        position = min(begins)
        before = text[:position].rstrip()
        while position < len(text):
            match = self.call.match(text, position)
            if match is None:
                return None
            calls.append(self._one(match[1], match[2], tools))
            position = match.end()
        good = all_calls(calls)
        return Parsed(before, good) if good else None

    def _one(self, name: str, body: str, tools: Sequence[JsonValue]) -> ToolCall | None:
        arguments: dict[str, JsonValue] = {}
        position = 0
        while position < len(body):
            match = self.argument.match(body, position)
            if match is None:
                return None
            arguments[match[1]] = typed(match[2], name, match[1], tools)
            position = match.end()
        return mint(name, dump_arguments(arguments))


KEY_VALUE = ("<arg_key>", "<arg_value>")

QWEN_XML = TaggedParser(
    Format(
        name="qwen_xml",
        marks=("<function=", "<parameter="),
        markers=("<tool_call>", "<function="),
        tokens=("<tool_call>", "</tool_call>"),
    ),
    call=re.compile(
        r"\s*+(?:<tool_call>\s*+)?+<function=([^>\n]++)>\s*+(.*?)</function>\s*+(?:</tool_call>\s*+)?+",
        re.DOTALL,
    ),
    argument=re.compile(r"\s*+<parameter=([^>\n]++)>\n?+(.*?)\n?</parameter>\s*+", re.DOTALL),
)
GLM = TaggedParser(
    Format(
        name="glm",
        marks=KEY_VALUE,
        markers=("<tool_call>",),
        tokens=("<tool_call>", "</tool_call>", "</arg_key>", "</arg_value>", *KEY_VALUE),
    ),
    call=re.compile(r"\s*+<tool_call>\s*+([^\s<]++)\s*+(.*?)</tool_call>\s*+", re.DOTALL),
    argument=re.compile(
        r"\s*+<arg_key>(.*?)</arg_key>\s*+<arg_value>(.*?)</arg_value>\s*+", re.DOTALL
    ),
)
