"""What a request says its answer must be, written as a grammar for the engine.

`strict: true` on a tool is no constraint: several SDKs send it with every tool, and a constrained
generation cannot be trained.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from whet.errors import RequestError
from whet.gateway.speech import Speech

Schema = Mapping[str, JsonValue]
ToolChoice = Literal["auto", "none", "required"]

ANY_OBJECT: Schema = {"type": "object"}
NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}

ONE_SPACE: dict[str, JsonValue] = {"whitespace_pattern": " "}
"""At most, between the parts of JSON: small models that may write white space write little else."""
TAG = re.compile(r"(<[^<>\n]+>|\[/?[A-Z_]+\])")
"""What may be a token of its own in a model's format."""
NAME = re.compile(r"[\w.:/-]{1,256}")


@dataclass(frozen=True, slots=True)
class Constraint:
    """An answer that must be JSON of a schema, or calls of some tools, or either."""

    schema: Schema | None = None
    """None if it may not be JSON."""
    tools: tuple[JsonValue, ...] = ()
    """Those it may call, as Chat Completions writes them."""
    several: bool = True
    """Whether it may make more than one call."""

    def grammar(self, speech: Speech, *, opened: bool = False) -> str:
        """As Lark text in llguidance's dialect, for a model that writes this way.

        It may think first if it is one that thinks; `opened` says that it has begun to.

        Raises:
            RequestError: the model's calls cannot be held to a grammar.
        """
        rules: dict[str, str] = {}
        if self.schema is not None:
            before, after = (_literal(text, speech.encode) for text in speech.answer)
            rules["answer"] = f"{before} answer_json {after}".strip()
        if self.tools:
            rules |= self._calls(speech)
        body = " | ".join(name for name in ("answer", "calls") if name in rules)
        if self.schema is not None:
            rules["answer_json"] = _json(self.schema)
        start = f"({body})"
        if speech.think is not None:
            opening, closing = speech.think
            start = f"thought {start}" if opened else f"(thinking thought)? {start}"
            rules["thinking"] = _literal(opening, speech.encode)
            rules |= _until(closing, speech.encode)
        return "\n".join([f"start: {start}", *(f"{name}: {rule}" for name, rule in rules.items())])

    def _calls(self, speech: Speech) -> dict[str, str]:
        form = speech.calls
        if form is None:
            raise RequestError(
                "tools: calls cannot be held to a grammar here, since the model's chat template "
                "does not write their arguments as JSON: leave tool_choice at 'auto', and "
                "response_format at 'text'"
            )
        before, middle, after = (
            _literal(text, speech.encode) for text in (form.before, form.middle, form.after)
        )
        more = ""
        if self.several and form.again is not None:
            more = f"({_literal(form.again, speech.encode)} call)*"
        named = [f"tool_{index}" for index in range(len(self.tools))]
        rules = {"calls": f"{before} call {more} {after}", "call": " | ".join(named)}
        for rule, tool in zip(named, self.tools, strict=True):
            name, parameters = _function(tool)
            if NAME.fullmatch(name) is None:
                raise RequestError(f"tools: {name!r} cannot be the name of a tool")
            rules[rule] = f"{_text(name)} {middle} {rule}_arguments"
            rules[f"{rule}_arguments"] = _json(parameters)
        return rules


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
    return f"%json {json.dumps({**schema, 'x-guidance': ONE_SPACE})}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _until(mark: str, encode: Callable[[str], Sequence[int]]) -> dict[str, str]:
    """Any text up to a mark, and the new lines behind it."""
    rest = r"/\n{0,4}/"
    if len(encode(mark)) == 1:
        return {"thought": rf"/(.|\n)*/ {_literal(mark, encode)} {rest}"}
    return {"thought": f"unmarked {rest}", f"unmarked[suffix={_text(mark)}]": r"/(.|\n)*/"}


def _literal(text: str, encode: Callable[[str], Sequence[int]]) -> str:
    """Fixed text; tags as the model's own tokens where it has them, which text never reaches."""
    parts: list[str] = []
    plain = ""
    for part in TAG.split(text):
        ids = encode(part)
        if len(ids) == 1 and TAG.fullmatch(part):
            parts += [_text(plain)] if plain else []
            parts.append(f"<[{ids[0]}]>")
            plain = ""
        else:
            plain += part
    return " ".join([*parts, *([_text(plain)] if plain else [])])
