"""Convert items of the Responses API to canonical messages and back.

A turn of the model is one message here and up to three kinds of items there: reasoning, message,
function calls. Item ids are made from the id of the call, so that a referenced item is found
in the store, by any gateway.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from whet.errors import NotFound, RequestError
from whet.gateway.dialects.dialect import Json
from whet.gateway.dialects.wire import read_text, read_type
from whet.gateway.graph import Graph
from whet.gateway.messages import Message, Role, ToolCall
from whet.types import Call, CallId

ITEM_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{24})(?:_\d+)?")
ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user"}
TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


def build_output_items(call: CallId, message: Message, *, complete: bool = True) -> list[Json]:
    """Convert a turn to items; one that is not `complete` was truncated."""
    items: list[Json] = []
    if message.reasoning:
        items.append(build_reasoning_item(call, message.reasoning))
    if message.content or not message.tool_calls:
        items.append(build_message_item(call, message.content, complete=complete))
    items += [build_call_item(call, index, made) for index, made in enumerate(message.tool_calls)]
    return items


def build_reasoning_item(call: CallId, text: str) -> Json:
    """Build a reasoning item."""
    content: list[JsonValue] = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{call}", "type": "reasoning", "summary": [], "content": content}


def build_message_item(
    call: CallId, text: str, *, complete: bool = True, logprobs: Sequence[JsonValue] = ()
) -> Json:
    """Build a message item."""
    return {
        "id": f"msg_{call}",
        "type": "message",
        "role": "assistant",
        "status": "completed" if complete else "incomplete",
        "content": [build_text_part(text, logprobs)],
    }


def build_text_part(text: str, logprobs: Sequence[JsonValue] = ()) -> Json:
    """Build the content part of a message item."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def build_call_item(call: CallId, index: int, made: ToolCall) -> Json:
    """Build a function-call item."""
    return {
        "id": f"fc_{call}_{index}",
        "type": "function_call",
        "call_id": made.id,
        "name": made.name,
        "arguments": made.arguments,
        "status": "completed",
    }


def build_input_items(call: CallId, messages: Sequence[Message]) -> list[Json]:
    """Convert the input messages of a response to items."""
    items: list[Json] = []
    for message in messages:
        if message.role == "assistant":
            items += build_output_items(call, message)
        elif message.role == "tool":
            output: Json = {"type": "function_call_output", "call_id": message.tool_call_id}
            items.append(output | {"output": message.content, "status": "completed"})
        else:
            content: list[JsonValue] = [{"type": "input_text", "text": message.content}]
            wire: Json = {"type": "message", "role": message.role, "content": content}
            items.append(wire | {"status": "completed"})
    return [item | {"id": f"{item.get('id', 'in')}_at_{at}"} for at, item in enumerate(items)]


def find_response(graph: Graph, id: str) -> Call:
    """Return a stored response. Raises NotFound if it is missing, not stored or deleted."""
    call = graph.calls.get(CallId(id.removeprefix("resp_")))
    if (
        call is None
        or call.origin.dialect != "responses"
        or call.origin.shown.get("store") is False
        or call.id in graph.hidden
    ):
        raise NotFound(f"unknown response {id!r}: this attempt has none of that id")
    return call


def read_items(items: Sequence[JsonValue], graph: Graph) -> list[Message]:
    """Convert input items to messages. Raises RequestError or NotFound that names the item."""
    reader = _Reader(graph)
    for index, item in enumerate(items):
        reader.add(item, f"input.{index}")
    reader.close()
    return reader.messages


@dataclass(slots=True)
class _OpenTurn:
    """A turn of the model, collected from its items."""

    call: str
    reasoning: str | None = None
    content: str | None = None
    calls: list[ToolCall] = field(default_factory=list[ToolCall])


class _Reader:
    def __init__(self, graph: Graph) -> None:
        self.messages: list[Message] = []
        self._graph = graph
        self._open: _OpenTurn | None = None

    def add(self, item: JsonValue, where: str) -> None:
        if not isinstance(item, dict):
            raise RequestError(f"{where}: expected an item")
        kind = "message" if "type" not in item and "role" in item else read_type(item, where)
        id = item.get("id")
        named = ITEM_ID.fullmatch(id) if isinstance(id, str) else None
        match kind:
            case "message":
                self._add_message(item, where, named[1] if named else "")
            case "reasoning":
                parts = read_text(item.get("content"), f"{where}.content", ("reasoning_text",))
                summary = read_text(item.get("summary"), f"{where}.summary", ("summary_text",))
                self._find_turn("reasoning", named[1] if named else "").reasoning = parts or summary
            case "function_call":
                made = ToolCall(
                    *(_read_text(item, f, where) for f in ("call_id", "name", "arguments"))
                )
                self._find_turn("calls", named[1] if named else "").calls.append(made)
            case "function_call_output":
                self.close()
                output = read_text(
                    item.get("output"), f"{where}.output", TEXT_PARTS, images=("input_image",)
                )
                id = _read_text(item, "call_id", where)
                self.messages.append(Message("tool", output, tool_call_id=id))
            case "item_reference":
                self.add(self._find_stored(_read_text(item, "id", where)), where)
            case _:
                raise RequestError(f"{where}: items of type {kind!r} are not supported")

    def close(self) -> None:
        """End the turn that is being read."""
        turn, self._open = self._open, None
        if turn is not None:
            self.messages.append(
                Message(
                    "assistant",
                    turn.content or "",
                    tuple(turn.calls),
                    reasoning=turn.reasoning or "",
                    call=turn.call,
                )
            )

    def _add_message(self, item: Json, where: str, call: str) -> None:
        text = read_text(item.get("content"), f"{where}.content", TEXT_PARTS)
        role = item.get("role")
        if role == "assistant":
            self._find_turn("content", call).content = text
        elif isinstance(role, str) and role in ROLES:
            self.close()
            self.messages.append(Message(ROLES[role], text))
        else:
            raise RequestError(f"{where}.role: unknown role {role!r}")

    def _find_turn(self, kind: str, call: str) -> _OpenTurn:
        """Return the turn an item belongs to: by its id, else by the order of the kinds."""
        turn = self._open
        same = turn is not None and bool(call) and turn.call == call
        if turn is not None and not same:
            other = bool(call and turn.call)
            after = kind != "calls" and (turn.content is not None or turn.calls)
            again = kind == "reasoning" and turn.reasoning is not None
            if other or after or again:
                self.close()
        if self._open is None:
            self._open = _OpenTurn(call)
        self._open.call = self._open.call or call
        return self._open

    def _find_stored(self, id: str) -> Json:
        named = ITEM_ID.fullmatch(id)
        if named is not None:
            call = find_response(self._graph, f"resp_{named[1]}")
            message = Message.from_json(call.generations[0].message)
            for item in build_output_items(call.id, message):
                if item["id"] == id:
                    return item
        raise NotFound(f"unknown item {id!r}: this attempt has none of that id")


def _read_text(item: Json, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name}: expected text")
    return value
