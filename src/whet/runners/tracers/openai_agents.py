"""Tracer for the OpenAI Agents SDK, which has a tracing API of its own."""

import hashlib
import importlib
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from whet.runners.tracers.span_owners import SpanOwners
from whet.types import Span

SCOPE = "openai_agents"
"""Instrumentation scope, and prefix of attributes that the GenAI conventions do not define."""

Exported = Mapping[str, Any]
"""The `export()` of a span of the SDK. Any: its JSON."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def install() -> None:
    """Replace the default trace processor, which uploads traces to api.openai.com.

    Tracing is turned on even if the program has turned it off: programs do so for that upload.
    """
    tracing: Any = importlib.import_module("agents.tracing")  # Any: an optional package
    tracing.set_trace_processors([_processor])
    tracing.set_tracing_disabled(False)


class AttemptTraceProcessor:
    """Adds each span that is started inside an attempt to it.

    It has the methods of the SDK's TracingProcessor, but is not a subclass: the SDK is optional.
    """

    def __init__(self) -> None:
        self._owners = SpanOwners()

    def on_trace_start(self, trace: Any) -> None:
        """Ignore: the spans have all there is."""

    def on_trace_end(self, trace: Any) -> None:
        """Ignore."""

    def on_span_start(self, span: Any) -> None:
        """Register the attempt of the span."""
        self._owners.start(span.span_id)

    def on_span_end(self, span: Any) -> None:
        """Add the span to its attempt."""
        response = getattr(span.span_data, "response", None)
        model = getattr(response, "model", None)
        self._owners.end(span.span_id, lambda: convert_span(span.export(), model=model))

    def shutdown(self) -> None:
        """Ignore: spans are not buffered."""

    def force_flush(self) -> None:
        """Ignore."""


_processor = AttemptTraceProcessor()


def convert_span(exported: Exported, *, model: str | None = None) -> Span:
    """Convert a span of the SDK. `model` is the response's, which the export leaves out."""
    data: dict[str, Any] = dict(exported["span_data"])
    kind = str(data.pop("type"))
    name, attributes = _CONVERTERS.get(kind, _convert_other)(kind, data, model)
    error: Exported = exported.get("error") or {}
    start = _to_nanoseconds(exported["started_at"])
    return Span(
        trace_id=_convert_id(exported["trace_id"], "trace_", 16),
        span_id=_convert_id(exported["id"], "span_", 8),
        parent_id=_convert_id(exported["parent_id"], "span_", 8)
        if exported.get("parent_id")
        else None,
        name=name,
        kind="client" if attributes.get("gen_ai.operation.name") == "chat" else "internal",
        start=start,
        end=max(start, _to_nanoseconds(exported["ended_at"])),
        status="error" if error else "ok",
        message=str(error.get("message", "")),
        attributes={key: value for key, value in attributes.items() if value is not None},
        scope=SCOPE,
    )


Converted = tuple[str, dict[str, JsonValue]]
"""Name and attributes of a span."""


def _convert_model_call(kind: str, data: dict[str, Any], model: str | None) -> Converted:
    usage: Exported = data.pop("usage", None) or {}
    model = data.pop("model", None) or model
    return f"chat {model or ''}".strip(), {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": model,
        "gen_ai.response.id": data.pop("response_id", None),
        "gen_ai.usage.input_tokens": usage.get("input_tokens"),
        "gen_ai.usage.output_tokens": usage.get("output_tokens"),
        **_prefix_rest(data),
    }


def _convert_tool_call(kind: str, data: dict[str, Any], model: str | None) -> Converted:
    tool = str(data.pop("name", ""))
    return f"execute_tool {tool}", {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": tool,
        "gen_ai.tool.call.arguments": _to_json(data.pop("input", None)),
        "gen_ai.tool.call.result": _to_json(data.pop("output", None)),
        **_prefix_rest(data),
    }


def _convert_agent(kind: str, data: dict[str, Any], model: str | None) -> Converted:
    agent = str(data.pop("name", ""))
    return f"invoke_agent {agent}", {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": agent,
        **_prefix_rest(data),
    }


def _convert_custom(kind: str, data: dict[str, Any], model: str | None) -> Converted:
    name, inner = str(data.pop("name")), dict(data.get("data") or {})
    if inner.pop("sdk_span_type", None) is None:
        return _convert_other(name, data, model)
    # A newer kind of the SDK's, exported as a custom span.
    return _convert_other(name, inner, model)


def _convert_other(kind: str, data: dict[str, Any], model: str | None) -> Converted:
    agent = data.pop("agent_name", None)
    return kind, {"gen_ai.agent.name": agent, **_prefix_rest(data)}


_CONVERTERS: dict[str, Callable[[str, dict[str, Any], str | None], Converted]] = {
    "response": _convert_model_call,
    "generation": _convert_model_call,
    "function": _convert_tool_call,
    "agent": _convert_agent,
    "custom": _convert_custom,
}


def _prefix_rest(data: Exported) -> dict[str, JsonValue]:
    return {f"{SCOPE}.{key}": _to_json(value) for key, value in data.items()}


def _to_json(value: object) -> JsonValue:
    return to_jsonable_python(value, fallback=repr, inf_nan_mode="strings")


def _convert_id(id: str, prefix: str, size: int) -> str:
    """Return an id in OpenTelemetry's format: unchanged if it fits, else its digest."""
    bare = id.removeprefix(prefix)
    if re.fullmatch(rf"[0-9a-f]{{{2 * size}}}", bare):
        return bare
    return hashlib.blake2b(id.encode(), digest_size=size).hexdigest()


def _to_nanoseconds(time: str) -> int:
    elapsed = datetime.fromisoformat(time) - EPOCH
    return ((elapsed.days * 86_400 + elapsed.seconds) * 1_000_000 + elapsed.microseconds) * 1000
