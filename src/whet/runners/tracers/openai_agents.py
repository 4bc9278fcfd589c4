"""Spans of the OpenAI Agents SDK, whose tracing is its own."""

import hashlib
import importlib
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from whet.runners.tracers.owners import Owners
from whet.types import Span

SCOPE = "openai_agents"
"""The instrumentation, and the prefix of what the GenAI conventions have no name for."""

Told = Mapping[str, Any]
"""What a span of the SDK exports of itself. Any: its JSON."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def install() -> None:
    """Take the place of what traces are given to by default: the upload to api.openai.com.

    Tracing is switched on where the program has switched it off, which it does for that upload.
    """
    tracing: Any = importlib.import_module("agents.tracing")  # Any: it is not installed with us
    tracing.set_trace_processors([_ours])
    tracing.set_tracing_disabled(False)


class AttemptSpans:
    """Keeps each span that is begun inside an attempt with it.

    It has the methods of the SDK's TracingProcessor and is no subclass, as that is not here.
    """

    def __init__(self) -> None:
        self._owners = Owners()

    def on_trace_start(self, trace: Any) -> None:
        """Nothing: what is told of a trace is told of its spans."""

    def on_trace_end(self, trace: Any) -> None:
        """Nothing."""

    def on_span_start(self, span: Any) -> None:
        """Note whose it is."""
        self._owners.begin(span.span_id)

    def on_span_end(self, span: Any) -> None:
        """Keep it."""
        response = getattr(span.span_data, "response", None)
        model = getattr(response, "model", None)
        self._owners.end(span.span_id, lambda: as_span(span.export(), model=model))

    def shutdown(self) -> None:
        """Nothing: no span is held back."""

    def force_flush(self) -> None:
        """Nothing."""


_ours = AttemptSpans()


def as_span(told: Told, *, model: str | None = None) -> Span:
    """A span of the SDK as ours. `model` is that of a response, which its export leaves out."""
    data: dict[str, Any] = dict(told["span_data"])
    kind = str(data.pop("type"))
    name, attributes = _NAMED.get(kind, _other)(kind, data, model)
    error: Told = told.get("error") or {}
    start = _nanoseconds(told["started_at"])
    return Span(
        trace_id=_id(told["trace_id"], "trace_", 16),
        span_id=_id(told["id"], "span_", 8),
        parent_id=_id(told["parent_id"], "span_", 8) if told.get("parent_id") else None,
        name=name,
        kind="client" if attributes.get("gen_ai.operation.name") == "chat" else "internal",
        start=start,
        end=max(start, _nanoseconds(told["ended_at"])),
        status="error" if error else "ok",
        message=str(error.get("message", "")),
        attributes={key: value for key, value in attributes.items() if value is not None},
        scope=SCOPE,
    )


Named = tuple[str, dict[str, JsonValue]]


def _model_call(kind: str, data: dict[str, Any], model: str | None) -> Named:
    usage: Told = data.pop("usage", None) or {}
    model = data.pop("model", None) or model
    return f"chat {model or ''}".strip(), {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": model,
        "gen_ai.response.id": data.pop("response_id", None),
        "gen_ai.usage.input_tokens": usage.get("input_tokens"),
        "gen_ai.usage.output_tokens": usage.get("output_tokens"),
        **_rest(data),
    }


def _tool_call(kind: str, data: dict[str, Any], model: str | None) -> Named:
    tool = str(data.pop("name", ""))
    return f"execute_tool {tool}", {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": tool,
        "gen_ai.tool.call.arguments": _plain(data.pop("input", None)),
        "gen_ai.tool.call.result": _plain(data.pop("output", None)),
        **_rest(data),
    }


def _agent(kind: str, data: dict[str, Any], model: str | None) -> Named:
    agent = str(data.pop("name", ""))
    return f"invoke_agent {agent}", {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": agent,
        **_rest(data),
    }


def _custom(kind: str, data: dict[str, Any], model: str | None) -> Named:
    name, inside = str(data.pop("name")), dict(data.get("data") or {})
    if inside.pop("sdk_span_type", None) is None:
        return _other(name, data, model)
    return _other(name, inside, model)  # a newer kind, told as a program's own is


def _other(kind: str, data: dict[str, Any], model: str | None) -> Named:
    agent = data.pop("agent_name", None)
    return kind, {"gen_ai.agent.name": agent, **_rest(data)}


_NAMED: dict[str, Callable[[str, dict[str, Any], str | None], Named]] = {
    "response": _model_call,
    "generation": _model_call,
    "function": _tool_call,
    "agent": _agent,
    "custom": _custom,
}


def _rest(data: Told) -> dict[str, JsonValue]:
    return {f"{SCOPE}.{key}": _plain(value) for key, value in data.items()}


def _plain(value: object) -> JsonValue:
    return to_jsonable_python(value, fallback=repr, inf_nan_mode="strings")


def _id(given: str, prefix: str, size: int) -> str:
    """An id as OpenTelemetry has them: as it is where it fits, else its digest."""
    bare = given.removeprefix(prefix)
    if re.fullmatch(rf"[0-9a-f]{{{2 * size}}}", bare):
        return bare
    return hashlib.blake2b(given.encode(), digest_size=size).hexdigest()


def _nanoseconds(time: str) -> int:
    passed = datetime.fromisoformat(time) - EPOCH
    return ((passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds) * 1000
