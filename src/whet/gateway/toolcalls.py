"""Finds tool calls in sampled text.

Hermes form, which Qwen, SmolLM and the tiny model write:

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "2 + 3"}}
    </tool_call>

Text that looks like a call but is none comes back as content, as inference servers do.
"""

import json
import re
import secrets

from whet.gateway.messages import Message, ToolCall

OPEN = "<tool_call>"
CALL = re.compile(r"\s*<tool_call>\s*(.*?)\s*</tool_call>\s*", re.DOTALL)


def parse(text: str) -> Message:
    """The assistant message that sampled text amounts to."""
    before, found, _ = text.partition(OPEN)
    calls = _calls(text[len(before) :]) if found else None
    if calls is None:
        return Message("assistant", text)
    return Message("assistant", before.rstrip(), calls)


def _calls(text: str) -> tuple[ToolCall, ...] | None:
    """All calls of a text that holds nothing else, or None."""
    calls: list[ToolCall] = []
    position = 0
    while position < len(text):
        match = CALL.match(text, position)
        call = _one(match[1]) if match else None
        if match is None or call is None:
            return None
        calls.append(call)
        position = match.end()
    return tuple(calls)


def _one(body: str) -> ToolCall | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    match value:
        case {"name": str(name), "arguments": dict()} if set(value) == {"name", "arguments"}:
            return ToolCall(f"call_{secrets.token_hex(12)}", name, _raw_arguments(body, value))
        case _:
            return None


def _raw_arguments(body: str, value: dict[str, object]) -> str:
    """The arguments as the model wrote them, or as plain JSON where they cannot be cut out."""
    decoder = json.JSONDecoder()
    for match in re.finditer(r'"arguments"\s*:\s*', body):
        try:
            found, end = decoder.raw_decode(body, match.end())
        except ValueError:
            continue
        if found == value["arguments"]:
            return body[match.end() : end]
    return json.dumps(value["arguments"], ensure_ascii=False)
