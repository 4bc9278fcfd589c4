"""Conversations as SDKs write them in each wire format, with their known liberties."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from support.gateway.wire import Json, WireToolCall, WireTurn

ODD_TOOL: Json = {
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
}
TOOL_SETS: tuple[tuple[Json, ...], ...] = (
    (),
    (ODD_TOOL,),
    (ODD_TOOL, {"name": "look_up", "description": "", "parameters": {"type": "object"}}),
)


@dataclass(frozen=True)
class System:
    text: str


@dataclass(frozen=True)
class User:
    text: str


@dataclass(frozen=True)
class Result:
    """A tool's result."""

    call: str
    text: str


Item = System | User | Result | WireTurn


@dataclass(frozen=True)
class Style:
    """An SDK's changes to a turn before it echoes it."""

    arguments: Literal["same", "dumps", "compact", "sorted", "ascii"] = "same"
    empty: Literal["null", "text", "absent", "blank"] = "null"
    parts: bool = False
    drops_text: bool = False
    """Beside tool calls, as CrewAI does."""
    drops_reasoning: bool = True
    adds: bool = False
    """Fields of its own, and those of the reply."""
    names_earlier: bool = False
    """Leaves earlier turns to the server where the format allows it."""

    def rewritten(self, arguments: str) -> str:
        if self.arguments == "same":
            return arguments
        separators = (",", ":") if self.arguments == "compact" else (", ", ": ")
        return json.dumps(
            json.loads(arguments),
            ensure_ascii=self.arguments == "ascii",
            separators=separators,
            sort_keys=self.arguments == "sorted",
        )


# --------------------------------------------------------------------------- chat


def write_chat(items: Sequence[Item], tools: Sequence[Json], style: Style) -> Json:
    body: Json = {"messages": [_chat_message(item, style) for item in items]}
    if tools or style.adds:
        body["tools"] = [{"type": "function", "function": tool} for tool in tools]
    return body


def _chat_message(item: Item, style: Style) -> Json:
    match item:
        case System(text):
            return {"role": "system", "content": text}
        case User(text):
            content = [{"type": "text", "text": text}] if style.parts else text
            return {"role": "user", "content": content}
        case Result(call, text):
            return {"role": "tool", "tool_call_id": call, "content": text}
        case WireTurn():
            return _chat_turn(item, style)


def _chat_turn(turn: WireTurn, style: Style) -> Json:
    message: Json = {"role": "assistant"}
    if style.adds:
        message |= {"refusal": None, "annotations": [], "audio": None, "name": "Assistant"}
    text = "" if turn.calls and style.drops_text else turn.text
    if text:
        message["content"] = [{"type": "text", "text": text}] if style.parts else text
    elif style.empty == "blank":
        message["content"] = "[blank text]"
    elif style.empty != "absent":
        message["content"] = None if style.empty == "null" else ""
    if turn.calls:
        message["tool_calls"] = [_chat_call(at, c, style) for at, c in enumerate(turn.calls)]
    if turn.reasoning and not style.drops_reasoning:
        message["reasoning_content" if style.adds else "reasoning"] = turn.reasoning
    return message


def _chat_call(at: int, call: WireToolCall, style: Style) -> Json:
    arguments = style.rewritten(call.arguments)
    wire: Json = {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }
    return wire | ({"index": at, "provider_specific_fields": {}} if style.adds else {})


# --------------------------------------------------------------------------- responses


def write_responses(items: Sequence[Item], tools: Sequence[Json], style: Style) -> Json:
    body: Json = {}
    if tools or style.adds:
        body["tools"] = [{"type": "function", "strict": True, **tool} for tool in tools]
    rest = list(items)
    if isinstance(rest[0], System):
        body["instructions"] = rest.pop(0).text
    turns = [at for at, item in enumerate(rest) if isinstance(item, WireTurn)]
    if style.names_earlier and turns:
        last = rest[turns[-1]]
        assert isinstance(last, WireTurn)
        if last.reply.startswith("resp_"):
            body["previous_response_id"] = last.reply
            rest = rest[turns[-1] + 1 :]
    body["input"] = [wire for item in rest for wire in _response_items(item, style)]
    return body


def _response_items(item: Item, style: Style) -> list[Json]:
    match item:
        case System(text):
            return [{"role": "system", "content": text}]
        case User(text):
            content = [{"type": "input_text", "text": text}] if style.parts else text
            return [{"role": "user", "content": content}]
        case Result(call, text):
            return [{"type": "function_call_output", "call_id": call, "output": text}]
        case WireTurn():
            return _response_turn(item, style)


def _response_turn(turn: WireTurn, style: Style) -> list[Json]:
    items: list[Json] = []
    if turn.reasoning and not style.drops_reasoning:
        content = [{"type": "reasoning_text", "text": turn.reasoning}]
        reasoning: Json = {"type": "reasoning", "summary": [], "content": content}
        items.append(reasoning | ({"id": turn.reasoning_item} if turn.reasoning_item else {}))
    if turn.text or not turn.calls:
        part = {"type": "output_text", "text": turn.text, "annotations": []}
        items.append({"type": "message", "role": "assistant", "content": [part]})
    for call in turn.calls:
        arguments = style.rewritten(call.arguments)
        wire: Json = {"type": "function_call", "call_id": call.id, "name": call.name}
        items.append(wire | {"arguments": arguments} | ({"id": call.item} if call.item else {}))
    return items


# --------------------------------------------------------------------------- messages


def write_messages(items: Sequence[Item], tools: Sequence[Json], style: Style) -> Json:
    body: Json = {"max_tokens": 4096}
    if tools:
        body["tools"] = [
            {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]}
            for t in tools
        ]
    rest = list(items)
    if isinstance(rest[0], System):
        text = rest.pop(0).text
        body["system"] = [{"type": "text", "text": text}] if style.parts else text
    messages: list[Json] = []
    for item in rest:
        role, blocks = _message_blocks(item, style)
        if messages and messages[-1]["role"] == role == "user" and _joins(messages[-1], item):
            messages[-1]["content"] += blocks
        else:
            messages.append({"role": role, "content": blocks})
    body["messages"] = messages
    return body


def _joins(before: Json, item: Item) -> bool:
    """Results come in one message, and what the user says with them too."""
    return before["content"][-1]["type"] == "tool_result"


def _message_blocks(item: Item, style: Style) -> tuple[str, list[Json]]:
    match item:
        case System(text):
            return "system", [{"type": "text", "text": text}]
        case User(text):
            return "user", [{"type": "text", "text": text}]
        case Result(call, text):
            content = [{"type": "text", "text": text}] if style.parts else text
            return "user", [{"type": "tool_result", "tool_use_id": call, "content": content}]
        case WireTurn():
            return "assistant", _message_turn(item, style)


def _message_turn(turn: WireTurn, style: Style) -> list[Json]:
    blocks: list[Json] = []
    if turn.reasoning and not style.drops_reasoning:
        signature = turn.signature or "c2ln"
        blocks.append({"type": "thinking", "thinking": turn.reasoning, "signature": signature})
    if turn.text and not (turn.calls and style.drops_text):
        blocks.append(
            {"type": "text", "text": turn.text} | ({"citations": None} if style.adds else {})
        )
    for call in turn.calls:
        arguments = json.loads(style.rewritten(call.arguments))
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks


Write = Callable[[Sequence[Item], Sequence[Json], Style], Json]

FORMATS: dict[str, Write] = {
    "/v1/chat/completions": write_chat,
    "/v1/responses": write_responses,
    "/v1/messages": write_messages,
}
"""By path."""
