"""JSON that every client, template and store can take: finite, UTF-8, and not nested without end.

Python's own reader lets NaN, lone surrogates and any depth in; each of them would fail much later,
in a reply or a record.
"""

import math
from typing import cast

from pydantic import JsonValue
from pydantic_core import from_json, to_json

_SHAPES = bytes.maketrans(b"123456789E", b"000000000e")
_LONG = b"0" * 300


def loads(text: str | bytes) -> JsonValue:
    """The value of JSON text. Raises ValueError that says what is wrong and where."""
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    value = cast(JsonValue, from_json(data, allow_inf_nan=False))
    shapes = data.translate(_SHAPES)  # what a number that is too large looks like, with digits 0
    may_overflow = b"0e000" in shapes or b"0e+000" in shapes or _LONG in shapes
    if may_overflow and not _is_finite(value):
        raise ValueError("a number is too large")
    return value


def dumps(value: JsonValue) -> bytes:
    """A value as compact JSON text."""
    return to_json(value)


def _is_finite(value: JsonValue) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, list) or all(map(_is_finite, value))
