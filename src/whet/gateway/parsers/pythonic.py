"""Calls as a Python list, which LFM2 and Llama 4 write: [calculator(expression="2 + 3")].

Read as syntax, never run.
"""

import ast
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import JsonValue

from whet.gateway.messages import ToolCall
from whet.gateway.parsers.parser import Format, Parsed, ToolParser, all_calls, dump_arguments, mint

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
LONGEST = 100_000
"""Characters; Python's own reader is not made for hostile text."""
JSON_NAMES: dict[str, JsonValue] = {"true": True, "false": False, "null": None}


@dataclass
class PythonicParser(ToolParser):
    """The list stands between two tokens, or is the whole text."""

    format: Format

    def parse(self, text: str, tools: Sequence[JsonValue] = ()) -> Parsed | None:
        before, found, after = text.partition(OPEN)
        body, closed, rest = after.partition(CLOSE) if found else (text, "", "")
        calls = _calls(body.strip())
        if not calls:
            return None
        # Text after the calls belongs to the same message.
        beside = [part for part in (before.rstrip(), rest.strip()) if part] if closed else [before]
        return Parsed("\n".join(beside) if found else "", calls)


LFM2 = PythonicParser(Format("pythonic", (OPEN,), (OPEN,), ("[",), (OPEN, CLOSE)))
LFM2_OLD = PythonicParser(replace(LFM2.format, marks=("<|tool_list_start|>",)))
"""Its template shows the tools and leaves the calls to the content."""
BARE_PYTHONIC = PythonicParser(Format("pythonic", ("[func_name1(",), starts=("[",)))


def _calls(text: str) -> tuple[ToolCall, ...] | None:
    if not text.startswith("[") or len(text) > LONGEST:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an unknown escape in a string is the model's affair
            body = ast.parse(text, mode="eval").body
        if not isinstance(body, ast.List):
            return None
        return all_calls([_one(item) for item in body.elts])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _one(node: ast.expr) -> ToolCall | None:
    if not isinstance(node, ast.Call) or node.args:
        return None
    arguments = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
    if any(keyword.arg is None for keyword in node.keywords):
        return None
    return mint(ast.unparse(node.func), dump_arguments(arguments))


def _value(node: ast.expr) -> JsonValue:
    """A literal, in Python's or JSON's spelling. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value=str() | int() | None as value):
            return value
        case ast.Constant(value=float(value)) if value - value == 0:
            return value
        case ast.Name(id=name) if name in JSON_NAMES:
            return JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_key(key): _value(value) for key, value in pairs}
        case _:
            raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(value=str(key)):
            return key
        case _:
            raise ValueError("not the key of an object")
