"""Replies of every wire format, read as a client reads them.

Knows nothing of the gateway's own code: it is what the gateway is held against.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any  # Any: wire JSON

Json = dict[str, Any]


@dataclass(frozen=True)
class WireToolCall:
    """A tool call of a turn."""

    id: str
    name: str
    arguments: str
    item: str = ""
    """The id of the item that holds it, where a format has items."""


@dataclass(frozen=True)
class WireTurn:
    """An assistant turn as it came off the wire."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[WireToolCall, ...] = ()
    reply: str = ""
    """The id of the whole reply."""
    message_item: str = ""
    reasoning_item: str = ""
    signature: str = ""
    stop: str = ""
    """As the format says it."""

    def ids(self) -> list[str]:
        """Whatever a later request may name the turn by, in an order all turns share."""
        items = [self.reply, self.message_item, self.reasoning_item, self.signature]
        return items + [id for call in self.calls for id in (call.id, call.item)]


def read_reply(path: str, reply: Json | Sequence[Json]) -> list[WireTurn]:
    """The choices of a reply: one JSON object, or the events of a stream."""
    if path.endswith("/chat/completions"):
        return _chat(reply)
    if path.endswith("/completions"):
        return _completions(reply)
    if path.endswith("/responses"):
        return [_responses(reply)]
    if path.endswith("/messages"):
        return [_messages(reply)]
    raise ValueError(f"no wire format is served at {path!r}")


def read_events(body: str) -> list[Json]:
    """The data of server-sent events."""
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# --------------------------------------------------------------------------- chat, completions


@dataclass
class _Choice:
    text: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    stop: str = ""


def _chat(reply: Json | Sequence[Json]) -> list[WireTurn]:
    events = [reply] if isinstance(reply, dict) else reply
    choices: dict[int, _Choice] = {}
    for event in events:
        assert "error" not in event, event
        for choice in event["choices"]:
            grown = choices.setdefault(choice["index"], _Choice())
            part = choice.get("message") or choice.get("delta") or {}
            grown.text += part.get("content") or ""
            grown.reasoning += part.get("reasoning_content") or part.get("reasoning") or ""
            grown.stop = choice.get("finish_reason") or grown.stop
            for at, call in enumerate(part.get("tool_calls") or ()):
                known = grown.calls.setdefault(call.get("index", at), ["", "", ""])
                function = call.get("function") or {}
                known[0] = call.get("id") or known[0]
                known[1] = function.get("name") or known[1]
                known[2] += function.get("arguments") or ""
    return [
        WireTurn(
            text=choice.text,
            reasoning=choice.reasoning,
            calls=tuple(WireToolCall(*choice.calls[at]) for at in sorted(choice.calls)),
            reply=events[0]["id"],
            stop=choice.stop,
        )
        for _, choice in sorted(choices.items())
    ]


def _completions(reply: Json | Sequence[Json]) -> list[WireTurn]:
    events = [reply] if isinstance(reply, dict) else reply
    choices: dict[int, _Choice] = {}
    for event in events:
        for choice in event["choices"]:
            grown = choices.setdefault(choice["index"], _Choice())
            grown.text += choice["text"]
            grown.stop = choice.get("finish_reason") or grown.stop
    return [
        WireTurn(text=choice.text, reply=events[0]["id"], stop=choice.stop)
        for _, choice in sorted(choices.items())
    ]


# --------------------------------------------------------------------------- responses


def _responses(reply: Json | Sequence[Json]) -> WireTurn:
    whole = reply if isinstance(reply, dict) else reply[-1]["response"]
    turn = WireTurn(reply=whole["id"], stop=whole["status"])
    for item in whole["output"]:
        if item["type"] == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            text = "".join(part["text"] for part in parts)
            turn = replace(turn, reasoning=turn.reasoning + text, reasoning_item=item["id"])
        elif item["type"] == "message":
            text = "".join(part["text"] for part in item["content"])
            turn = replace(turn, text=turn.text + text, message_item=item["id"])
        elif item["type"] == "function_call":
            call = WireToolCall(item["call_id"], item["name"], item["arguments"], item["id"])
            turn = replace(turn, calls=(*turn.calls, call))
    return turn


# --------------------------------------------------------------------------- messages


def _messages(reply: Json | Sequence[Json]) -> WireTurn:
    if isinstance(reply, dict):
        blocks, whole, stop = reply["content"], reply, reply["stop_reason"]
    else:
        blocks, whole, stop = _messages_events(reply)
    turn = WireTurn(reply=whole["id"], stop=stop or "")
    for block in blocks:
        if block["type"] == "thinking":
            turn = replace(
                turn, reasoning=turn.reasoning + block["thinking"], signature=block["signature"]
            )
        elif block["type"] == "text":
            turn = replace(turn, text=turn.text + block["text"])
        elif block["type"] == "tool_use":
            arguments = json.dumps(block["input"], ensure_ascii=False)
            turn = replace(
                turn, calls=(*turn.calls, WireToolCall(block["id"], block["name"], arguments))
            )
    return turn


def _messages_events(events: Sequence[Json]) -> tuple[list[Json], Json, str]:
    blocks: dict[int, Json] = {}
    inputs: dict[int, str] = {}
    whole: Json = {}
    stop = ""
    for event in events:
        assert event["type"] != "error", event
        if event["type"] == "message_start":
            whole = event["message"]
        elif event["type"] == "content_block_start":
            blocks[event["index"]] = dict(event["content_block"])
        elif event["type"] == "content_block_delta":
            at, delta = event["index"], event["delta"]
            for name in ("text", "thinking", "signature"):
                if name in delta:
                    blocks[at][name] += delta[name]
            inputs[at] = inputs.get(at, "") + delta.get("partial_json", "")
        elif event["type"] == "message_delta":
            stop = event["delta"].get("stop_reason") or stop
    for at, block in blocks.items():
        if block["type"] == "tool_use":
            block["input"] = json.loads(inputs.get(at) or "{}")
    return [blocks[at] for at in sorted(blocks)], whole, stop
