"""Python literals in the text of a model: parsed as syntax, never executed."""

import ast
import re
import sys
import warnings

from pydantic import JsonValue

MAX_LENGTH = 100_000
"""Characters; Python's parser is not made for hostile text."""
MAX_NUMBER = sys.float_info.max
"""Integers, too: those of very many hexadecimal digits cannot be written as JSON."""
JSON_NAMES: dict[str, JsonValue] = {"true": True, "false": False, "null": None}
STRING = re.compile(r"('(?:[^'\\]|\\.)*+(?:'|\\?\Z)|\"(?:[^\"\\]|\\.)*+(?:\"|\\?\Z))", re.DOTALL)
"""A string, or the rest of the text where one does not end: searching it for another start at each
quote would take quadratic time."""
RAW_CHARACTERS = {"\n": "\\n", "\r": "\\r", "\0": "\\x00"}
"""Characters that models write as they are in strings, which is not Python."""
LEADING_ZEROS = re.compile(r"(?<![\w.])0+(?=[0-9])")


def parse_python(text: str) -> list[ast.stmt] | None:
    """Parse text as Python, or return None. Line breaks in strings and leading zeros are read."""
    if len(text) > MAX_LENGTH:
        return None
    for source in (text, _repair(text)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about unknown escapes in a model's strings
                return ast.parse(source).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return None


def parse_literal(text: str) -> JsonValue:
    """Parse one literal, or return None if the text is anything else."""
    try:
        match parse_python(text):
            case [ast.Expr(value=node)]:
                return evaluate_literal(node)
            case _:
                return None
    except (ValueError, RecursionError):
        return None


def evaluate_literal(node: ast.expr) -> JsonValue:
    """Evaluate a literal in Python's or JSON's spelling. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value=str() | None as value):
            return value
        case ast.Constant(value=int() | float() as number) if abs(number) <= MAX_NUMBER:
            return number
        case ast.Name(id=name) if name in JSON_NAMES:
            return JSON_NAMES[name]
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as n)) if n <= MAX_NUMBER:
            return -n
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [evaluate_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_evaluate_key(key): evaluate_literal(value) for key, value in pairs}
        case _:
            raise ValueError("not a literal")


def _evaluate_key(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(value=str(key)):
            return key
        case _:
            raise ValueError("not the key of an object")


def _repair(text: str) -> str:
    parts = STRING.split(text)  # strings are the parts with odd indices
    parts[::2] = [LEADING_ZEROS.sub("", part) for part in parts[::2]]
    for raw, escaped in RAW_CHARACTERS.items():
        parts[1::2] = [part.replace(raw, escaped) for part in parts[1::2]]
    return "".join(parts)
