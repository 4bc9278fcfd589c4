"""Tracer for OpenTelemetry: spans of every SDK that uses the global provider."""

import base64
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as OpenSpan
from pydantic import JsonValue

from whet.errors import ConfigError
from whet.io.otlp import ATTEMPT
from whet.runners.tracers.span_owners import SpanOwners
from whet.types import Span, SpanEvent

_installed: list[object] = []
"""Providers that have our processor, for the life of the process."""


def install() -> None:
    """Add our processor to the global provider, which is created if it is missing.

    Raises:
        ConfigError: telemetry is off, or the provider accepts no processors.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        raise ConfigError(
            "the tracer 'otel' needs telemetry, found OTEL_SDK_DISABLED=true: unset it, or leave "
            "out the tracer"
        )
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):  # the default
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    if any(provider is known for known in _installed):
        return
    add = getattr(provider, "add_span_processor", None)  # also of other SDKs
    if add is None:
        raise ConfigError(
            f"the tracer 'otel' needs a provider with add_span_processor; found "
            f"{type(provider).__module__}.{type(provider).__qualname__}"
        )
    add(AttemptSpanProcessor())
    _installed.append(provider)


class AttemptSpanProcessor(SpanProcessor):
    """Adds each span that is started inside an attempt to it; ignores others."""

    def __init__(self) -> None:
        self._owners = SpanOwners()

    def on_start(self, span: OpenSpan, parent_context: Context | None = None) -> None:
        if (context := self._owners.start(_build_key(span))) is not None:
            span.set_attribute(ATTEMPT, context.attempt.id)

    def on_end(self, span: ReadableSpan) -> None:
        self._owners.end(_build_key(span), partial(convert_span, span))


def convert_span(span: ReadableSpan) -> Span:
    """Convert a span of the SDK; every attribute keeps its name."""
    context = span.context
    assert context is not None
    start = span.start_time or 0
    return Span(
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        parent_id=f"{span.parent.span_id:016x}" if span.parent else None,
        name=span.name,
        kind=cast(Any, span.kind.name.lower()),  # Any: the literals are the names of the enum
        start=start,
        end=max(start, span.end_time or start),
        status=cast(Any, span.status.status_code.name.lower()),
        message=span.status.description or "",
        attributes=_convert_attributes(span.attributes),
        events=tuple(
            SpanEvent(
                name=event.name,
                time=event.timestamp,
                attributes=_convert_attributes(event.attributes),
            )
            for event in span.events
        ),
        scope=span.instrumentation_scope.name if span.instrumentation_scope else "",
        resource=_convert_attributes(span.resource.attributes),
    )


def _build_key(span: ReadableSpan) -> tuple[int, int]:
    context = span.context
    assert context is not None
    return context.trace_id, context.span_id


def _convert_attributes(attributes: Mapping[str, object] | None) -> dict[str, JsonValue]:
    return {key: _to_json(value) for key, value in (attributes or {}).items()}


def _to_json(value: object) -> JsonValue:
    """Convert an attribute to JSON, in the same way as the store reads it from an exporter."""
    match value:
        case float():
            return value if math.isfinite(value) else str(value)
        case None | bool() | int() | str():
            return value
        case bytes():
            return base64.b64encode(value).decode()
        case Mapping():
            items = cast(Mapping[object, object], value).items()
            return {str(key): _to_json(item) for key, item in items}
        case Sequence():
            return [_to_json(each) for each in cast(Sequence[object], value)]
        case _:
            return str(value)
