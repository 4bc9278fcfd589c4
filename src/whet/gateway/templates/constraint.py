"""Constrained output: JSON schemas and tool choices of a request as a grammar for the engine.

`strict: true` on a tool is not a constraint: several SDKs send it with every tool, and a
constrained generation cannot be trained.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from whet.errors import RequestError
from whet.gateway.parsers.parser import NAME
from whet.gateway.templates.output_format import OutputFormat

Schema = Mapping[str, JsonValue]
ToolChoice = Literal["auto", "none", "required"]

ANY_OBJECT: Schema = {"type": "object"}
NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}

COMPACT_JSON: dict[str, JsonValue] = {"whitespace_pattern": " "}
"""At most one space between the parts of JSON: small models would write little else."""
TAG = re.compile(r"(<[^<>\n]+>|\[/?[A-Z_]+\])")
"""Text that may be a special token of a model."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """An answer that must match a JSON schema, or call some tools, or either."""

    schema: Schema | None = None
    """Schema of a JSON answer; None if only calls are allowed."""
    tools: tuple[JsonValue, ...] = ()
    """Tools that may be called, in the format of Chat Completions."""
    parallel: bool = True
    """Whether more than one call is allowed."""

    def to_grammar(self, output: OutputFormat, *, in_thinking: bool = False) -> str:
        """Build a Lark grammar in llguidance's dialect for a model with this output format.

        Thinking may come first if the model thinks; `in_thinking`: the prompt has opened it.

        Raises:
            RequestError: the model's calls cannot be constrained.
        """
        rules: dict[str, str] = {}
        if self.schema is not None:
            before, after = (_build_literal(text, output.encode) for text in output.answer)
            rules["answer"] = f"{before} answer_json {after}".strip()
        if self.tools:
            rules |= self._build_call_rules(output)
        body = " | ".join(name for name in ("answer", "calls") if name in rules)
        if self.schema is not None:
            rules["answer_json"] = _format_json(self.schema)
        start = f"({body})"
        if output.thinking is not None:
            opening, closing = output.thinking
            start = f"thought {start}" if in_thinking else f"(thinking thought)? {start}"
            rules["thinking"] = _build_literal(opening, output.encode)
            rules |= _build_thought_rules(closing, output.encode)
        return "\n".join([f"start: {start}", *(f"{name}: {rule}" for name, rule in rules.items())])

    def _build_call_rules(self, output: OutputFormat) -> dict[str, str]:
        calls = output.calls
        if calls is None:
            raise RequestError(
                "tools: calls cannot be held to a grammar here, since the model's chat template "
                "does not write their arguments as JSON: leave tool_choice at 'auto', and "
                "response_format at 'text'"
            )
        before, middle, after = (
            _build_literal(text, output.encode)
            for text in (calls.before, calls.middle, calls.after)
        )
        more = ""
        if self.parallel and calls.separator is not None:
            more = f"({_build_literal(calls.separator, output.encode)} call)*"
        names = [f"tool_{index}" for index in range(len(self.tools))]
        rules = {"calls": f"{before} call {more} {after}", "call": " | ".join(names)}
        for rule, tool in zip(names, self.tools, strict=True):
            name, parameters = _read_function(tool)
            if NAME.fullmatch(name) is None:
                raise RequestError(f"tools: {name!r} cannot be the name of a tool")
            rules[rule] = f"{_format_text(name)} {middle} {rule}_arguments"
            rules[f"{rule}_arguments"] = _format_json(parameters)
        return rules


def build_constraint(
    tools: Sequence[JsonValue],
    *,
    choice: ToolChoice = "auto",
    tool_name: str | None = None,
    schema: Schema | None = None,
    parallel: bool = True,
) -> Constraint | None:
    """Build the constraint of a request, or None if the answer is free.

    `tool_name` is the one tool that must be called, `schema` the schema of a JSON answer.

    Raises:
        RequestError: a tool must be called, but the request has none, or none of that name.
    """
    if tool_name is not None:
        wanted = tuple(tool for tool in tools if _read_function(tool)[0] == tool_name)
        if not wanted:
            raise RequestError(
                f"tool_choice: there is no tool {tool_name!r} among the request's tools"
            )
        return Constraint(tools=wanted[:1], parallel=False)
    if choice == "required":
        if not tools:
            raise RequestError("tool_choice: a tool must be called, but the request has no tools")
        return Constraint(tools=tuple(tools), parallel=parallel)
    if schema is None:
        return None
    return Constraint(schema, tuple(tools) if choice == "auto" else (), parallel)


def _read_function(tool: JsonValue) -> tuple[str, Schema]:
    """Name of a tool and the schema of its arguments, which are always an object."""
    match tool:
        case {"function": {"name": str(name), "parameters": dict(parameters)}}:
            return name, {**parameters, "type": "object"}
        case {"function": {"name": str(name)}}:
            return name, NO_ARGUMENTS
        case _:
            raise RequestError("tools: a tool without a function name cannot be called")


def _format_json(schema: Schema) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': COMPACT_JSON})}"


def _format_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _build_thought_rules(tag: str, encode: Callable[[str], Sequence[int]]) -> dict[str, str]:
    """Rules for any text up to a tag, and the new lines after it."""
    rest = r"/\n{0,4}/"
    if len(encode(tag)) == 1:
        return {"thought": rf"/(.|\n)*/ {_build_literal(tag, encode)} {rest}"}
    return {"thought": f"unmarked {rest}", f"unmarked[suffix={_format_text(tag)}]": r"/(.|\n)*/"}


def _build_literal(text: str, encode: Callable[[str], Sequence[int]]) -> str:
    """Rule for fixed text; tags become special tokens where the model has them."""
    parts: list[str] = []
    plain = ""
    for part in TAG.split(text):
        ids = encode(part)
        if len(ids) == 1 and TAG.fullmatch(part):  # text rules never match special tokens
            parts += [_format_text(plain)] if plain else []
            parts.append(f"<[{ids[0]}]>")
            plain = ""
        else:
            plain += part
    return " ".join([*parts, *([_format_text(plain)] if plain else [])])
