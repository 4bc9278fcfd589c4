"""What a request says its answer must be, written as a grammar for the engine.

`strict: true` on a tool is no constraint: several SDKs send it with every tool, and a constrained
generation cannot be trained.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from whet.errors import RequestError

Schema = Mapping[str, JsonValue]
ToolChoice = Literal["auto", "none", "required"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""Around a call in Hermes form, the one `toolcalls` reads."""

ANY_OBJECT: Schema = {"type": "object"}
NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}

WHITE_SPACE: dict[str, JsonValue] = {"whitespace_pattern": r"[ \t\r\n]{1,32}"}
"""Between the parts of JSON. Bounded, since a model that may write a space for ever will."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """An answer that must be JSON of a schema, or calls of some tools, or either."""

    schema: Schema | None = None
    """None if it may not be JSON."""
    tools: tuple[JsonValue, ...] = ()
    """Those it may call, as Chat Completions writes them."""
    several: bool = True
    """Whether it may make more than one call."""

    def grammar(self, encode: Callable[[str], Sequence[int]]) -> str:
        """As Lark text in llguidance's dialect; `encode` turns text into the model's ids."""
        rules: dict[str, str] = {}
        if self.schema is not None:
            rules["answer"] = _json(self.schema)
        if self.tools:
            rules["calls"] = f"call ({_text(chr(10))} call)*" if self.several else "call"
        start = " | ".join(rules)
        named = [f"tool_{index}" for index in range(len(self.tools))]
        if named:
            around = (_marker(OPEN, encode), _marker(CLOSE, encode))
            line = _text("\n")
            rules["call"] = f"{around[0]} {line} ({' | '.join(named)}) {line} {around[1]}"
        for rule, tool in zip(named, self.tools, strict=True):
            name, parameters = _function(tool)
            before = _text(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ')
            rules[rule] = f"{before} {rule}_arguments {_text('}')}"
            rules[f"{rule}_arguments"] = _json(parameters)
        return "\n".join([f"start: {start}", *(f"{name}: {rule}" for name, rule in rules.items())])


def constraint(
    tools: Sequence[JsonValue],
    *,
    choice: ToolChoice = "auto",
    named: str | None = None,
    schema: Schema | None = None,
    several: bool = True,
) -> Constraint | None:
    """What these settings of a request ask for, or None if the answer is free.

    `named` is the one tool that must be called, `schema` that of an answer in JSON.

    Raises:
        RequestError: a tool must be called and there is none, or none of that name.
    """
    if named is not None:
        wanted = tuple(tool for tool in tools if _function(tool)[0] == named)
        if not wanted:
            raise RequestError(f"tool_choice: there is no tool {named!r} among the request's tools")
        return Constraint(tools=wanted[:1], several=False)
    if choice == "required":
        if not tools:
            raise RequestError("tool_choice: a tool must be called, but the request has no tools")
        return Constraint(tools=tuple(tools), several=several)
    if schema is None:
        return None
    return Constraint(schema, tuple(tools) if choice == "auto" else (), several)


def _function(tool: JsonValue) -> tuple[str, Schema]:
    """A tool's name and the schema of its arguments, which are always an object."""
    match tool:
        case {"function": {"name": str(name), "parameters": dict(parameters)}}:
            return name, {**parameters, "type": "object"}
        case {"function": {"name": str(name)}}:
            return name, NO_ARGUMENTS
        case _:
            raise RequestError("tools: a tool without a function name cannot be called")


def _json(schema: Schema) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': WHITE_SPACE})}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _marker(text: str, encode: Callable[[str], Sequence[int]]) -> str:
    """A tag: the model's own token for it where it has one, which text alone might not reach."""
    ids = encode(text)
    return f"<[{ids[0]}]>" if len(ids) == 1 else _text(text)
