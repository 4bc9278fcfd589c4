"""Tool calls with one tag per argument, as Qwen3-Coder, Nemotron, GLM, MiniMax and others write.

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

Where the values are not typed, the schema of the tool gives their types.
"""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from whet.gateway.messages import ToolCall
from whet.gateway.parsers.argument_types import coerce_value, find_property, find_schema
from whet.gateway.parsers.parser import (
    ParsedOutput,
    ToolCallFormat,
    ToolParser,
    create_call,
    dump_arguments,
    match_all,
    require_all,
)


@dataclass
class XmlTagParser(ToolParser):
    """Parse calls by two patterns. Nothing else may stand between or after the calls."""

    format: ToolCallFormat
    call: re.Pattern[str]
    """One call, with two groups: its name and the text of its arguments."""
    argument: re.Pattern[str]
    """One argument, with two groups: its name and its value. With a group `typed`, which is "true"
    or "string" if the value is text and anything else if it is JSON, the value is group `value`. A
    group `verbatim` is the value if it matches."""
    wrapper: re.Pattern[str] | None = None
    """All calls with the tags around them, of which group 1 is the calls."""

    def parse(self, text: str, tools: Sequence[JsonValue] = ()) -> ParsedOutput | None:
        starts = [at for marker in self.format.markers if (at := text.find(marker)) >= 0]
        start = min(starts, default=len(text))
        wrapped = self.wrapper.fullmatch(text, start) if self.wrapper else None
        if self.wrapper is not None and wrapped is None:
            return None
        matches = match_all(self.call, wrapped[1] if wrapped else text[start:]) or []
        calls = require_all([self._parse_call(m[1], m[2], tools) for m in matches])
        return ParsedOutput(text[:start].rstrip(), calls) if calls else None

    def _parse_call(self, name: str, body: str, tools: Sequence[JsonValue]) -> ToolCall | None:
        matches = match_all(self.argument, body.strip())
        if matches is None:
            return None
        schema = find_schema(name, tools)
        values = {
            html.unescape(m[1]): _parse_value(m, find_property(schema, html.unescape(m[1])))
            for m in matches
        }
        return create_call(name, dump_arguments(values))


def _parse_value(match: re.Match[str], schema: JsonValue) -> JsonValue:
    groups = match.groupdict()
    value = groups.get("value", match[2])
    if groups.get("typed") in ("true", "string"):
        return value
    return coerce_value(groups.get("verbatim") or value or "", schema)


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"\s*+{pattern}\s*+", re.DOTALL)


KEY_VALUE = ("<arg_key>", "<arg_value>")

QWEN_XML = XmlTagParser(
    ToolCallFormat(
        name="qwen_xml",
        template_marks=("<function=", "<parameter="),
        markers=("<tool_call>", "<function="),
        special_tokens=("<tool_call>", "</tool_call>"),
    ),
    call=re.compile(
        r"\s*+(?:<tool_call>\s*+)?+<function=([^>\n]++)>\s*+(.*?)</function>\s*+(?:</tool_call>\s*+)?+",
        re.DOTALL,
    ),
    argument=re.compile(r"\s*+<parameter=([^>\n]++)>\n?+(.*?)\n?</parameter>\s*+", re.DOTALL),
)
GLM = XmlTagParser(
    ToolCallFormat(
        name="glm",
        template_marks=KEY_VALUE,
        markers=("<tool_call>",),
        special_tokens=("<tool_call>", "</tool_call>", "</arg_key>", "</arg_value>", *KEY_VALUE),
    ),
    call=re.compile(r"\s*+<tool_call>\s*+([^\s<]++)\s*+(.*?)</tool_call>\s*+", re.DOTALL),
    argument=re.compile(
        r"\s*+<arg_key>(.*?)</arg_key>\s*+<arg_value>(.*?)</arg_value>\s*+", re.DOTALL
    ),
)
SEED = XmlTagParser(
    ToolCallFormat(
        name="seed",
        template_marks=("<seed:tool_call>", "<function="),
        markers=("<seed:tool_call>",),
        special_tokens=("<seed:tool_call>", "</seed:tool_call>"),
    ),
    call=_compile(
        r"<seed:tool_call>\s*+<function=([^>\n]++)>\s*+(.*?)</function>\s*+</seed:tool_call>"
    ),
    argument=_compile(r"<parameter=([^>\n]++)>(.*?)</parameter>"),
)
MINIMAX_M2 = XmlTagParser(
    ToolCallFormat(
        name="minimax_m2",
        template_marks=("<minimax:tool_call>",),
        markers=("<minimax:tool_call>",),
        special_tokens=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    call=_compile(r'<invoke name="([^"\n]++)">\s*+(.*?)</invoke>'),
    argument=_compile(r'<parameter name="([^"\n]++)">(.*?)</parameter>'),
    wrapper=_compile("<minimax:tool_call>(.*)</minimax:tool_call>"),
)
MINICPM5 = XmlTagParser(
    ToolCallFormat("minicpm5", ('<function name="', "<param name="), ('<function name="',)),
    call=_compile(
        r'<function name="([^"\n]++)">((?:<!\[CDATA\[.*?\]\]>|[^<]|<(?!/function>))*+)</function>'
    ),
    argument=_compile(
        r'<param name="([^"\n]++)">'
        r"(?:\s*+<!\[CDATA\[(?P<verbatim>.*?)\]\]>\s*+|(?P<value>.*?))</param>"
    ),
)
DSML = "\uff5cDSML\uff5c"
DEEPSEEK_DSML = XmlTagParser(
    ToolCallFormat(
        name="deepseek_dsml",
        template_marks=(DSML, "invoke"),
        markers=(f"<{DSML}function_calls>", f"<{DSML}tool_calls>"),
        special_tokens=(DSML,),
    ),
    call=_compile(rf'<{DSML}invoke name="([^"\n]++)">\s*+(.*?)</{DSML}invoke>'),
    argument=_compile(
        rf'<{DSML}parameter name="([^"\n]++)"(?= string="(?P<typed>\w++)"|>)[^>]*+>'
        rf"(?P<value>.*?)</{DSML}parameter>"
    ),
    wrapper=_compile(rf"<{DSML}(?:function|tool)_calls>(.*)</{DSML}(?:function|tool)_calls>"),
)
_HY3_TAGS = ("tool_calls", "tool_call", "arg_key", "arg_value")
_HY3_ENDS = ("", ":opensource")
HY3 = XmlTagParser(
    ToolCallFormat(
        name="hy3",
        template_marks=("<tool_calls", "<tool_sep", "<arg_key"),
        markers=("<tool_calls:", "<tool_calls>"),
        special_tokens=(
            *(f"<{slash}{t}{e}>" for t in _HY3_TAGS for e in _HY3_ENDS for slash in ("", "/")),
            *(f"<tool_sep{e}>" for e in _HY3_ENDS),
        ),
    ),
    call=_compile(
        r"<tool_call(?::\w++)?+>\s*+([^\s<]++)\s*+<tool_sep(?::\w++)?+>(.*?)</tool_call(?::\w++)?+>"
    ),
    argument=_compile(
        r"<arg_key(?::\w++)?+>(.*?)</arg_key(?::\w++)?+>\s*+"
        r"<arg_value(?::\w++)?+>(.*?)</arg_value(?::\w++)?+>"
    ),
    wrapper=_compile(r"<tool_calls(?::\w++)?+>(.*)</tool_calls(?::\w++)?+>"),
)
K3_OPEN, K3_CLOSE, K3_SEP = "<|open|>", "<|close|>", "<|sep|>"
_O, _C, _S = (re.escape(token) for token in (K3_OPEN, K3_CLOSE, K3_SEP))
KIMI_K3 = XmlTagParser(
    ToolCallFormat(
        name="kimi_k3",
        template_marks=(K3_OPEN, K3_CLOSE, K3_SEP),
        markers=(f"{K3_OPEN}tools{K3_SEP}",),
        special_tokens=(K3_OPEN, K3_CLOSE, K3_SEP),
        content_tags=(
            f"{K3_OPEN}response{K3_SEP}",
            f"{K3_CLOSE}response{K3_SEP}",
            f"{K3_CLOSE}message{K3_SEP}",
        ),
    ),
    call=_compile(rf'{_O}call tool="([^"\n]++)" index="\d++"{_S}(.*?){_C}call{_S}'),
    argument=_compile(
        rf'{_O}argument key="([^"\n]++)" type="(?P<typed>\w++)"{_S}(?P<value>.*?){_C}argument{_S}'
    ),
    wrapper=_compile(rf"{_O}tools{_S}(.*){_C}tools{_S}(?:{_C}message{_S})?+"),
)
XML_TAGS = (SEED, MINIMAX_M2, MINICPM5, DEEPSEEK_DSML, HY3, KIMI_K3)
