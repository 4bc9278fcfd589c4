"""Tool calls as Python, as LFM2, Llama 4 and OLMo 3 write: [calculator(expression="2 + 3")].

The text is parsed as syntax and never executed.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import JsonValue

from whet.gateway.messages import ToolCall
from whet.gateway.parsers.literals import evaluate_literal, parse_python
from whet.gateway.parsers.parser import (
    ParsedOutput,
    ToolCallFormat,
    ToolParser,
    create_call,
    dump_arguments,
    require_all,
)

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"


@dataclass
class PythonicParser(ToolParser):
    """Parse calls between two tags, or a list that is the whole text if the format has these."""

    format: ToolCallFormat
    open: str = OPEN
    close: str = CLOSE

    def parse(self, text: str, tools: Sequence[JsonValue] = ()) -> ParsedOutput | None:
        before, found, after = text.partition(self.open)
        body, closed, rest = after.partition(self.close) if found else (text, "", "")
        is_call = found or text.lstrip().startswith(tuple(self.format.starts))
        calls = _parse_calls(body.strip()) if is_call else None
        if not calls:
            return None
        # Text after the calls belongs to the same message.
        beside = [part for part in (before.rstrip(), rest.strip()) if part] if closed else [before]
        return ParsedOutput("\n".join(beside) if found else "", calls)


LFM2 = PythonicParser(ToolCallFormat("pythonic", (OPEN,), (OPEN,), ("[",), (OPEN, CLOSE)))
OLMO_TAGS = ("<function_calls>", "</function_calls>")
PYTHONIC = (
    LFM2,
    # LFM2 templates that show tools but do not render calls.
    PythonicParser(replace(LFM2.format, template_marks=("<|tool_list_start|>",))),
    PythonicParser(replace(LFM2.format, template_marks=("List of tools: [", "keep_past_thinking"))),
    PythonicParser(ToolCallFormat("pythonic", ("[func_name1(",), starts=("[",))),
    PythonicParser(
        ToolCallFormat("olmo3", OLMO_TAGS[:1], OLMO_TAGS[:1], special_tokens=OLMO_TAGS), *OLMO_TAGS
    ),
)


def _parse_calls(text: str) -> tuple[ToolCall, ...] | None:
    """Parse a list of calls, or calls line by line."""
    try:
        body = parse_python(text)
        return require_all([_parse_call(node) for node in _list_expressions(body or [])])
    except (ValueError, RecursionError):
        return None


def _list_expressions(statements: Sequence[ast.stmt]) -> list[ast.expr]:
    """The items of a list, or the expressions that are statements. Raises ValueError otherwise."""
    match statements:
        case [ast.Expr(value=ast.List(elts=items))]:
            return items
        case _:
            found = [s.value for s in statements if isinstance(s, ast.Expr)]
            if len(found) != len(statements):
                raise ValueError("not only calls")
            return found


def _parse_call(node: ast.expr) -> ToolCall | None:
    if not isinstance(node, ast.Call) or node.args:
        return None
    arguments = {str(keyword.arg): evaluate_literal(keyword.value) for keyword in node.keywords}
    if any(keyword.arg is None for keyword in node.keywords):
        return None
    return create_call(ast.unparse(node.func), dump_arguments(arguments))
