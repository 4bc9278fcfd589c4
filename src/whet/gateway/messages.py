"""Canonical messages, which every wire format is converted to, and strict JSON.

SDKs echo earlier turns re-serialized: other white space in arguments, null for "", parts for
strings. Canonical messages of equal meaning are equal here; bytes are never compared.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Literal, NamedTuple, cast

from pydantic import JsonValue
from pydantic_core import from_json, to_json

from whet.types import Omission

BLANK = "[blank text]"
"""Placeholder that Strands writes for a turn without text."""

OMITTED_IMAGE = "[an image, which this model cannot see]"
"""Text in place of an image in a tool result."""

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(NamedTuple):
    """A tool call of an assistant turn."""

    id: str
    """Minted by the gateway and unique, so that an echo of it identifies its turn."""
    name: str
    arguments: str
    """The text the model wrote; JSON if the call parsed."""
    model_id: str = ""
    """The id that the model wrote, which prompts show instead of ours; "" if it wrote none."""

    def same_as(self, echo: "ToolCall") -> bool:
        """Return whether `echo` is this call, sent back. Invalid JSON matches by id and name."""
        if self.id != echo.id or self.name != echo.name:
            return False
        mine = self.parse_arguments()
        return mine is None or equals_with_defaults(mine, echo.parse_arguments(), None)

    def to_json(self) -> JsonValue:
        """Serialize for the store."""
        value: dict[str, JsonValue] = {"id": self.id, "name": self.name}
        value["arguments"] = self.arguments
        return value | ({"model_id": self.model_id} if self.model_id else {})

    def parse_arguments(self) -> dict[str, JsonValue] | None:
        """Return the arguments as an object, or None if they are anything else."""
        try:
            value = parse_json(self.arguments)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None


class Message(NamedTuple):
    """One message of a conversation."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""
    name: str = ""
    """Name of the speaker, or of the tool of a result, if the client sends one."""
    extends: bool = False
    """Whether it is text that a client has appended to the sampled turn before it."""
    call: str = ""
    """Id of the model call that sampled it, if the client names that; not stored."""

    def same_as(self, echo: "Message") -> bool:
        """Return whether `echo` is this message, sent back by an SDK."""
        if self == echo:
            return True
        if (self.role, self.tool_call_id, self.extends) != (
            *(echo.role, echo.tool_call_id, echo.extends),
        ):
            return False
        if len(self.tool_calls) != len(echo.tool_calls):
            return False
        pairs = zip(self.tool_calls, echo.tool_calls, strict=True)
        if not all(mine.same_as(theirs) for mine, theirs in pairs):
            return False
        # Some SDKs drop the text beside tool calls; the calls' ids still identify the turn.
        # Most drop reasoning, and hand-written agents strip white space.
        may_lack_text = bool(self.tool_calls) or not self.content.strip()
        dropped = may_lack_text and echo.content in ("", BLANK)
        reasoned = not echo.reasoning or self.reasoning.strip() == echo.reasoning.strip()
        if self.role != "assistant":
            return reasoned and (self.content, self.name) == (echo.content, echo.name)
        return reasoned and (dropped or self.content.strip() == echo.content.strip())

    def find_added(self, echo: "Message") -> str:
        """Return the text that `echo`, a turn sent back, has after this turn's; "" if none."""
        mine, theirs = self.content.strip(), echo.content.strip()
        if not mine or echo.role != "assistant" or self.tool_calls or echo.tool_calls:
            return ""
        return theirs.removeprefix(mine) if theirs.startswith(mine) else ""

    def loses_text_in(self, echo: "Message") -> bool:
        """Return whether `echo`, which is this message sent back, lacks some of its text."""
        return self.content != echo.content or self.reasoning != echo.reasoning

    def to_json(self) -> dict[str, JsonValue]:
        """Serialize for the store."""
        value: dict[str, JsonValue] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            value["tool_calls"] = [call.to_json() for call in self.tool_calls]
        if self.tool_call_id:
            value["tool_call_id"] = self.tool_call_id
        if self.reasoning:
            value["reasoning"] = self.reasoning
        if self.name:
            value["name"] = self.name
        if self.extends:
            value["extends"] = True
        return value

    @classmethod
    def from_json(cls, value: dict[str, JsonValue]) -> "Message":
        """Deserialize the value of `to_json`."""
        texts = cast(dict[str, str], value)
        calls = cast(list[dict[str, str]], value.get("tool_calls", ()))
        return cls(
            cast(Role, texts["role"]),
            texts["content"],
            tuple(
                ToolCall(c["id"], c["name"], c["arguments"], c.get("model_id", "")) for c in calls
            ),
            texts.get("tool_call_id", ""),
            texts.get("reasoning", ""),
            texts.get("name", ""),
            bool(value.get("extends")),
        )

    def to_template(self) -> dict[str, JsonValue]:
        """Convert to what Hugging Face chat templates expect: arguments as an object if valid."""
        value: dict[str, JsonValue] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            value["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        if self.tool_call_id:
            value["tool_call_id"] = self.tool_call_id
        if self.reasoning:
            value["reasoning_content"] = self.reasoning
        if self.name:
            value["name"] = self.name
        return value


def join_extensions(messages: Sequence[Message]) -> list[Message]:
    """Append text that extends a turn to the turn, as the client has sent it."""
    turns: list[Message] = []
    for message in messages:
        if message.extends:
            turns[-1] = turns[-1]._replace(content=turns[-1].content.strip() + message.content)
        else:
            turns.append(message)
    return turns


def is_echo(mine: Sequence[Message], echo: Sequence[Message]) -> bool:
    """Return whether a sequence of messages is the echo of another."""
    return len(mine) == len(echo) and all(m.same_as(e) for m, e in zip(mine, echo, strict=True))


def _call_for_template(call: ToolCall) -> dict[str, JsonValue]:
    arguments = call.parse_arguments()
    function: dict[str, JsonValue] = {
        "name": call.name,
        "arguments": call.arguments if arguments is None else arguments,
    }
    return {"id": call.id, "type": "function", "function": function}


# ------------------------------------------------------------------- echoed tool calls


def restore_calls(
    sampled: Mapping[str, ToolCall], messages: Sequence[Message], tools: Sequence[JsonValue]
) -> tuple[Message, ...]:
    """Replace tool calls that are sent back by the sampled ones, which are given by id.

    They have the id that the model wrote, and not the arguments that a client fills in from the
    defaults of the tool, as Claude Code does. A call that was edited stays as it is.
    """
    if not sampled:
        return tuple(messages)
    schemas = dict(_read_schema(tool) for tool in tools)
    return tuple(
        m._replace(tool_calls=tuple(_restore(c, sampled.get(c.id), schemas) for c in m.tool_calls))
        if m.tool_calls
        else m
        for m in messages
    )


def _restore(
    echo: ToolCall, sampled: ToolCall | None, schemas: Mapping[str, JsonValue]
) -> ToolCall:
    if sampled is None:
        return echo
    echo = echo._replace(model_id=sampled.model_id)
    if echo.arguments == sampled.arguments or echo.name != sampled.name:
        return echo
    schema = schemas.get(echo.name)
    same = equals_with_defaults(sampled.parse_arguments(), echo.parse_arguments(), schema)
    return sampled if same else echo


def _read_schema(tool: JsonValue) -> tuple[str, JsonValue]:
    match tool:
        case {"function": {"name": str(name), "parameters": schema}}:
            return name, schema
        case _:
            return "", None


def equals_with_defaults(mine: JsonValue, echo: JsonValue, schema: JsonValue) -> bool:
    """Return whether `echo` is `mine` with nothing added but defaults of a JSON schema."""
    schema = schema if isinstance(schema, dict) else {}
    match mine, echo:
        case dict(), dict():
            found = schema.get("properties")
            properties = found if isinstance(found, dict) else {}
            return mine.keys() <= echo.keys() and all(
                equals_with_defaults(mine[key], value, properties.get(key))
                if key in mine
                else _is_default(value, properties.get(key))
                for key, value in echo.items()
            )
        case list(), list():
            return len(mine) == len(echo) and all(
                equals_with_defaults(m, e, schema.get("items"))
                for m, e in zip(mine, echo, strict=True)
            )
        case _:
            # In Python true is 1. That 1.0 is 1 is intended: JavaScript sends it back as 1.
            return mine == echo and isinstance(mine, bool) == isinstance(echo, bool)


def _is_default(value: JsonValue, schema: JsonValue) -> bool:
    match schema:
        case {"default": default}:
            return equals_with_defaults(default, value, None)
        case _:
            return False


# ------------------------------------------------------------------- omissions


def find_omissions(
    omissions: frozenset[Omission], messages: Sequence[Message], request: Sequence[Message]
) -> tuple[Omission, ...]:
    """Return the parts of a request that its prompt lacks; its last `messages` are rendered."""
    found = [omission for omission in Omission if omission in omissions]
    found = [omission for omission in found if _occurs(omission, messages, request)]
    # Sampled turns are served as they were sampled, without the name that an echo may have.
    echoes = request[: len(request) - len(messages)]
    if Omission.NAME not in found and any(m.name and m.role == "assistant" for m in echoes):
        found.append(Omission.NAME)
    return tuple(found)


def _occurs(omission: Omission, messages: Sequence[Message], request: Sequence[Message]) -> bool:
    roles = [message.role for message in messages]
    begins = len(messages) == len(request)
    leading = len([*takewhile(lambda role: role == "system", roles)]) if begins else 0
    match omission:
        case Omission.SYSTEM:
            return leading > 0
        case Omission.LATE_SYSTEM:
            return "system" in roles[leading:]
        case Omission.USER:
            return ("user", "user") in pairwise(roles)
        case Omission.CALL_TEXT:
            return any(m.tool_calls and m.content.strip() for m in messages)
        case Omission.SECOND_CALL:
            return any(len(m.tool_calls) > 1 for m in messages)
        case Omission.LONE_RESULT:
            called = {call.id for message in request for call in message.tool_calls}
            return any(m.role == "tool" and m.tool_call_id not in called for m in messages)
        case Omission.NAME:
            return any(m.name for m in messages)
        case Omission.HIDDEN_CALL:
            return False  # of a reply


# ------------------------------------------------------------------- strict JSON
#
# Python's own reader accepts NaN, lone surrogates and any depth; each would fail much later, in a
# reply or a record. Only finite numbers, valid UTF-8 and bounded nesting are accepted here.

_DIGITS_TO_ZERO = bytes.maketrans(b"123456789E", b"000000000e")
_LONG_NUMBER = b"0" * 200
"""Digits without which a number is finite if its exponent has no more than two."""


def parse_json(text: str | bytes) -> JsonValue:
    """Parse JSON text. Raises ValueError that reports the error and its position."""
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    value = cast(JsonValue, from_json(data, allow_inf_nan=False))
    # The parser turns numbers that are too large into infinities; look only where there may be one.
    digits = data.translate(_DIGITS_TO_ZERO)
    may_overflow = b"0e000" in digits or b"0e+000" in digits or _LONG_NUMBER in digits
    if may_overflow and not _is_finite(value):
        raise ValueError("a number is too large")
    return value


def dump_json(value: JsonValue) -> bytes:
    """Serialize a value as compact JSON."""
    return to_json(value)


def _is_finite(value: JsonValue) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, list) or all(map(_is_finite, value))
