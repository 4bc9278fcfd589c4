"""JSON for the dashboard: values that browsers can parse, without secrets."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import cast

import pydantic_core
from starlette.responses import Response

from whet.io.text import hide_passwords

SECRET = re.compile(r"(^|_)(api_?key|key|token|secret|password)$", re.IGNORECASE)
"""Names of values that are not shown."""
HIDDEN = "(hidden)"
QUESTIONS = ("question", "prompt", "problem", "instruction", "query", "input", "task", "text")
"""Names under which tasks have their question."""


def to_browser_json(value: object) -> bytes:
    """Encode a value; NaN and infinities, which browsers refuse, become null."""
    try:
        return pydantic_core.to_json(value, inf_nan_mode="null")
    except pydantic_core.PydanticSerializationError:  # a lone surrogate: escaped, it is valid JSON
        return json.dumps(_make_finite(value), allow_nan=False, default=str).encode()


def respond(value: object) -> Response:
    """Build a response with JSON, which is never cached."""
    headers = {"Cache-Control": "no-store"}
    return Response(to_browser_json(value), media_type="application/json", headers=headers)


def hide_secrets(value: object, name: str = "") -> object:
    """Return a config or resource without values that are named like keys, tokens and passwords."""
    if isinstance(value, Mapping):
        pairs = cast(Mapping[str, object], value).items()
        return {key: hide_secrets(below, str(key)) for key, below in pairs}
    if isinstance(value, list | tuple):
        return [hide_secrets(below, name) for below in cast(Sequence[object], value)]
    if isinstance(value, str):
        return HIDDEN if value and SECRET.search(name) else hide_passwords(value)
    return value


def shorten(value: object, length: int) -> str:
    """Return a value as one short text."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= length else text[: length - 1] + "…"


def describe_task(task: object, length: int) -> str:
    """Return a task as one short text: its question where it has one, else its JSON."""
    if not isinstance(task, Mapping):
        return shorten(task, length)
    fields = cast(Mapping[str, object], task)
    for name in QUESTIONS:
        if isinstance(found := fields.get(name), str) and found:
            return shorten(found, length)
    return shorten(fields, length)


def _make_finite(value: object) -> object:
    if isinstance(value, Mapping):
        pairs = cast(Mapping[str, object], value).items()
        return {str(key): _make_finite(below) for key, below in pairs}
    if isinstance(value, list | tuple):
        return [_make_finite(below) for below in cast(Sequence[object], value)]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value
