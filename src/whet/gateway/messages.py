"""The one canonical form of a conversation, whatever wire format it came in.

SDKs echo earlier turns back re-serialised: other white space in arguments, null for "", parts for
strings. Canonical messages of equal meaning are equal here; bytes are never compared.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

from pydantic import JsonValue

from whet.gateway import strictjson

BLANK = "[blank text]"
"""What Strands writes where a turn had no text."""

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(NamedTuple):
    """A call the model made."""

    id: str
    """Minted by the gateway and unique, so an echo of it names its turn."""
    name: str
    arguments: str
    """The text the model wrote; JSON if the call parsed."""

    def same_as(self, echo: "ToolCall") -> bool:
        """Whether `echo` is this call come back. Arguments that are no JSON go by the id alone."""
        if self.id != echo.id:
            return False
        mine = self.parsed()
        return mine is None or mine == echo.parsed()

    def parsed(self) -> dict[str, JsonValue] | None:
        """The arguments as an object, or None if they are none."""
        try:
            value = strictjson.loads(self.arguments)
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

    def same_as(self, echo: "Message") -> bool:
        """Whether `echo` is this message come back from an SDK."""
        if self == echo:
            return True
        if self.role != echo.role or self.tool_call_id != echo.tool_call_id:
            return False
        if len(self.tool_calls) != len(echo.tool_calls):
            return False
        pairs = zip(self.tool_calls, echo.tool_calls, strict=True)
        if not all(mine.same_as(theirs) for mine, theirs in pairs):
            return False
        # Some SDKs drop the text beside tool calls; the calls' ids name the turn all the same.
        # Most drop reasoning.
        dropped = bool(self.tool_calls) and not echo.content
        dropped = dropped or (echo.content == BLANK and not self.content.strip())
        reasoned = not echo.reasoning or self.reasoning == echo.reasoning
        return reasoned and (dropped or self.content == echo.content)

    def lost_in(self, echo: "Message") -> bool:
        """Whether `echo`, which is this message come back, lacks some of its text."""
        return self.content != echo.content or self.reasoning != echo.reasoning

    def to_json(self) -> dict[str, JsonValue]:
        """For the store."""
        value: dict[str, JsonValue] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            value["tool_calls"] = [
                {"id": c.id, "name": c.name, "arguments": c.arguments} for c in self.tool_calls
            ]
        if self.tool_call_id:
            value["tool_call_id"] = self.tool_call_id
        if self.reasoning:
            value["reasoning"] = self.reasoning
        return value

    @classmethod
    def from_json(cls, value: dict[str, JsonValue]) -> "Message":
        """What `to_json` was called on."""
        texts = cast(dict[str, str], value)
        calls = cast(list[dict[str, str]], value.get("tool_calls", ()))
        return cls(
            cast(Role, texts["role"]),
            texts["content"],
            tuple(ToolCall(c["id"], c["name"], c["arguments"]) for c in calls) if calls else (),
            texts.get("tool_call_id", ""),
            texts.get("reasoning", ""),
        )

    def for_template(self) -> dict[str, JsonValue]:
        """As Hugging Face chat templates expect it: arguments as an object where they are one."""
        value: dict[str, JsonValue] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            value["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        if self.tool_call_id:
            value["tool_call_id"] = self.tool_call_id
        if self.reasoning:
            value["reasoning_content"] = self.reasoning
        return value


def all_same(mine: Sequence[Message], echo: Sequence[Message]) -> bool:
    """Whether one run of messages is the echo of another."""
    return len(mine) == len(echo) and all(m.same_as(e) for m, e in zip(mine, echo, strict=True))


def _call_for_template(call: ToolCall) -> dict[str, JsonValue]:
    arguments = call.parsed()
    function: dict[str, JsonValue] = {
        "name": call.name,
        "arguments": call.arguments if arguments is None else arguments,
    }
    return {"id": call.id, "type": "function", "function": function}
