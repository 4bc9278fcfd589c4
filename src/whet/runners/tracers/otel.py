"""Spans of OpenTelemetry: of every SDK that uses the global provider."""

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
from whet.runners.tracers.owners import Owners
from whet.types import Span, SpanEvent

ATTEMPT = "whet.attempt"
"""By this attribute a store that gets the span from an exporter as well knows whose it is."""

_installed: list[object] = []
"""The providers that have our processor; they last as long as their process."""


def install() -> None:
    """Put our processor into the provider of this process, which is set if there is none.

    Raises:
        ConfigError: telemetry is off, or the provider takes no processors.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        raise ConfigError("the tracer 'otel' finds OTEL_SDK_DISABLED=true: unset it, or the tracer")
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):  # nobody has set one
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    if any(provider is known for known in _installed):
        return
    add = getattr(provider, "add_span_processor", None)  # other makes than the SDK's have it too
    if add is None:
        raise ConfigError(
            f"the tracer 'otel' needs a provider with add_span_processor; this program has set "
            f"{type(provider).__module__}.{type(provider).__qualname__}"
        )
    add(AttemptSpans())
    _installed.append(provider)


class AttemptSpans(SpanProcessor):
    """Keeps each span that is begun inside an attempt with it; others are left alone."""

    def __init__(self) -> None:
        self._owners = Owners()

    def on_start(self, span: OpenSpan, parent_context: Context | None = None) -> None:
        if (now := self._owners.begin(_key(span))) is not None:
            span.set_attribute(ATTEMPT, now.attempt.id)

    def on_end(self, span: ReadableSpan) -> None:
        self._owners.end(_key(span), partial(as_span, span))


def as_span(span: ReadableSpan) -> Span:
    """A span of the SDK as ours: every attribute under its own name."""
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
        attributes=_attributes(span.attributes),
        events=tuple(
            SpanEvent(
                name=event.name, time=event.timestamp, attributes=_attributes(event.attributes)
            )
            for event in span.events
        ),
        scope=span.instrumentation_scope.name if span.instrumentation_scope else "",
        resource=_attributes(span.resource.attributes),
    )


def _key(span: ReadableSpan) -> tuple[int, int]:
    context = span.context
    assert context is not None
    return context.trace_id, context.span_id


def _attributes(given: Mapping[str, object] | None) -> dict[str, JsonValue]:
    return {key: _plain(value) for key, value in (given or {}).items()}


def _plain(value: object) -> JsonValue:
    """An attribute as plain JSON, the way the store reads it from an exporter."""
    match value:
        case float():
            return value if math.isfinite(value) else str(value)
        case None | bool() | int() | str():
            return value
        case bytes():
            return base64.b64encode(value).decode()
        case Mapping():
            items = cast(Mapping[object, object], value).items()
            return {str(key): _plain(held) for key, held in items}
        case Sequence():
            return [_plain(each) for each in cast(Sequence[object], value)]
        case _:
            return str(value)
