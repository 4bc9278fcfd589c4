"""Report on recorded traffic: which tokens re-tokenizing its conversations would change.

One JSON object a line, with `run` (which conversation), `body` (a Chat Completions request) and
`reply` (the response, or the list of its streamed chunks). Every assistant turn that a later
request sends back is compared with the response it came from.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError

from whet.app.inputs import read_jsonl
from whet.errors import ConfigError, RequestError
from whet.gateway.dialects.chat import CHAT
from whet.gateway.graph import Graph
from whet.gateway.messages import Message, ToolCall
from whet.gateway.templates.chat_template import ChatTemplate


class _Reply(NamedTuple):
    """An assistant message, in canonical form and as it was sent."""

    message: Message
    wire: JsonValue


def build_traffic_report(file: Path, template: ChatTemplate) -> dict[str, JsonValue]:
    """Count the turns that were sent back, and those whose tokens a new rendering changes."""
    replies: dict[str, list[_Reply]] = {}
    counts: Counter[str] = Counter()
    for record in _read_records(file):
        body = record.get("body")
        if not isinstance(body, dict) or "messages" not in body or "reply" not in record:
            counts["skipped"] += 1
            continue
        try:
            ask = CHAT.parse(json.dumps(body).encode()).to_model_request(Graph())
        except RequestError:
            counts["skipped"] += 1
            continue
        run = replies.setdefault(str(record.get("run", "")), [])
        counts["calls"] += 1
        wires = cast(list[dict[str, JsonValue]], body["messages"])
        for index, message in enumerate(ask.messages):
            if message.role == "assistant":
                _compare(message, wires[index], run, template, counts)
        if (reply := _read_reply(record["reply"])) is not None:
            run.append(reply)
    return _report(counts)


def _compare(
    echo: Message,
    wire: JsonValue,
    run: Sequence[_Reply],
    template: ChatTemplate,
    counts: Counter[str],
) -> None:
    """Compare the tokens of one echoed turn with its own tokenization, and count the result."""
    counts["turns_back"] += 1
    match = next((s for s in reversed(run) if s.message.same_as(echo)), None)
    if match is None:
        counts["unmatched"] += 1
        return
    mine, theirs = _encode(match.message, template), _encode(echo, template)
    counts["matched"] += 1
    counts["same_bytes"] += match.wire == wire
    counts["turns_drifted"] += mine != theirs
    counts["tokens"] += len(mine)
    counts["tokens_drifted"] += sum(a != b for a, b in zip(mine, theirs, strict=False))
    counts["tokens_drifted"] += abs(len(mine) - len(theirs))


def _encode(message: Message, template: ChatTemplate) -> list[int]:
    """The tokens of a message as a re-tokenizing trainer would encode it, arguments unchanged."""
    calls = "".join(
        f'\n<tool_call>\n{{"name": "{c.name}", "arguments": {c.arguments}}}\n</tool_call>'
        for c in message.tool_calls
    )
    return template.encode(message.content + calls)


def _read_reply(reply: JsonValue) -> _Reply | None:
    """The assistant message of a reply, whole or streamed."""
    try:
        if isinstance(reply, dict):
            whole = _Whole.model_validate(reply).choices[0].message
            return _Reply(whole.to_canonical(), cast(Any, reply)["choices"][0]["message"])
        deltas = [c.delta for chunk in _CHUNKS.validate_python(reply) for c in chunk.choices]
    except (ValidationError, IndexError):
        return None
    message = _Wire(
        content="".join(delta.content or "" for delta in deltas),
        reasoning="".join(delta.find_reasoning() for delta in deltas),
    )
    calls: dict[int, _WireCall] = {}
    for part in (part for delta in deltas for part in delta.tool_calls or []):
        calls[part.index] = calls.get(part.index, _WireCall()) + part
    message.tool_calls = list(calls.values())
    return _Reply(message.to_canonical(), {"role": "assistant", "content": message.content})


class _WireFunction(BaseModel):
    name: str | None = None
    arguments: str | None = None


class _WireCall(BaseModel):
    index: int = 0
    id: str | None = None
    function: _WireFunction = _WireFunction()

    def __add__(self, part: "_WireCall") -> "_WireCall":
        """Append a later chunk."""
        function = _WireFunction(
            name=(self.function.name or "") + (part.function.name or ""),
            arguments=(self.function.arguments or "") + (part.function.arguments or ""),
        )
        return _WireCall(index=part.index, id=self.id or part.id, function=function)


class _Wire(BaseModel):
    """An assistant message, or a delta of one."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_WireCall] | None = None

    def find_reasoning(self) -> str:
        """Return the thinking, which servers send under one name or both."""
        return self.reasoning or self.reasoning_content or ""

    def to_canonical(self) -> Message:
        calls = self.tool_calls or []
        return Message(
            "assistant",
            self.content or "",
            tuple(
                ToolCall(c.id or "", c.function.name or "", c.function.arguments or "")
                for c in calls
            ),
            reasoning=self.find_reasoning(),
        )


class _WholeChoice(BaseModel):
    message: _Wire


class _Whole(BaseModel):
    choices: list[_WholeChoice]


class _ChunkChoice(BaseModel):
    delta: _Wire = _Wire()


class _Chunk(BaseModel):
    choices: list[_ChunkChoice] = []


_CHUNKS = TypeAdapter(list[_Chunk])


def _report(counts: Counter[str]) -> dict[str, JsonValue]:
    names = ("calls", "skipped", "turns_back", "matched", "unmatched", "same_bytes")
    more = ("turns_drifted", "tokens", "tokens_drifted")
    return {name: counts[name] for name in (*names, *more)}


def _read_records(file: Path) -> list[dict[str, JsonValue]]:
    records: list[dict[str, JsonValue]] = []
    for number, value in read_jsonl(file, "recorded calls", strict=False):
        if not isinstance(value, dict):
            raise ConfigError(f"{str(file)!r} line {number}: expected a JSON object")
        records.append(value)
    return records
