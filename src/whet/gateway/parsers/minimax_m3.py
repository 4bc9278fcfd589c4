"""Tool calls as nested elements, as MiniMax M3 writes them. M stands for its token ]<]minimax[>[.

M<tool_call>
M<invoke name="plot">M<points>M<item>M<x>1M</x>M<y>2M</y>M</item>M</points>M</invoke>
M</tool_call>

Elements named `item` are the items of a list; any other names are the keys of an object.
"""

import re
from collections.abc import Sequence

from pydantic import JsonValue

from whet.gateway.messages import ToolCall
from whet.gateway.parsers.argument_types import (
    coerce_value,
    find_items,
    find_property,
    find_schema,
    list_types,
)
from whet.gateway.parsers.parser import (
    ParsedOutput,
    ToolCallFormat,
    ToolParser,
    create_call,
    dump_arguments,
    match_all,
    require_all,
)

TOKEN = "]<]minimax[>["
OPEN, CLOSE = f"{TOKEN}<tool_call>", f"{TOKEN}</tool_call>"
CALL = re.compile(
    r'\s*+M<invoke name="([^"\n]++)">(.*?)M</invoke>\s*+'.replace("M", re.escape(TOKEN)), re.DOTALL
)
TAG = re.compile(re.escape(TOKEN) + r"<(/?)([^<>\s]++)>")
MAX_DEPTH = 50

Node = str | list[tuple[str, "Node"]]
"""The text of an element, or its elements by name."""


class MinimaxM3Parser(ToolParser):
    """Parse MiniMax M3 calls; only white space may stand between or after them."""

    format = ToolCallFormat(
        name="minimax_m3", template_marks=(TOKEN,), markers=(OPEN,), special_tokens=(TOKEN,)
    )

    def parse(self, text: str, tools: Sequence[JsonValue] = ()) -> ParsedOutput | None:
        before, _, after = text.partition(OPEN)
        body, closed, rest = after.partition(CLOSE)
        if not closed or rest.strip():
            return None
        matches = match_all(CALL, body.strip()) or []
        calls = require_all([_parse_call(m[1], m[2], tools) for m in matches])
        return ParsedOutput(before.rstrip(), calls) if calls else None


def _parse_call(name: str, body: str, tools: Sequence[JsonValue]) -> ToolCall | None:
    elements = _parse_elements(body)
    if elements is None:
        return None
    schema = find_schema(name, tools)
    values = {key: _convert(node, find_property(schema, key)) for key, node in elements}
    return create_call(name, dump_arguments(values))


def _parse_elements(text: str) -> list[tuple[str, Node]] | None:
    """Parse the elements in a text, or return None if it has anything else."""
    found: list[tuple[str, Node]] = []
    parents: list[tuple[str, list[tuple[str, Node]]]] = []
    """The elements that are open, each with those before it in its parent."""
    position = 0
    for tag in TAG.finditer(text):
        inner, position = text[position : tag.start()], tag.end()
        if not tag[1]:
            if inner.strip() or len(parents) == MAX_DEPTH:
                return None
            parents.append((tag[2], found))
            found = []
            continue
        if not parents or parents[-1][0] != tag[2] or (found and inner.strip()):
            return None
        name, siblings = parents.pop()
        siblings.append((name, found or inner))
        found = siblings
    return None if parents or text[position:].strip() else found


def _convert(node: Node, schema: JsonValue) -> JsonValue:
    """Convert an element to the value of an argument."""
    types = list_types(schema)
    if isinstance(node, str):
        if not node and types & {"array", "object"}:
            return [] if "array" in types else {}
        return coerce_value(node, schema)
    names = {name for name, _ in node}
    if names == {"item"} and ("array" in types or "object" not in types):
        return [_convert(item, find_items(schema)) for _, item in node]
    values: dict[str, JsonValue] = {}
    for name in dict.fromkeys(name for name, _ in node):
        same = [_convert(n, find_property(schema, name)) for key, n in node if key == name]
        values[name] = same[0] if len(same) == 1 else same
    return values
