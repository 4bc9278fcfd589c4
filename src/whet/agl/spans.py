"""Spans as Agent Lightning 0.3 stores them: OpenTelemetry's, with the ids of their attempt."""

import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from whet.agl.semconv import AGL_VIRTUAL, Attributes

if TYPE_CHECKING:
    from whet.types import Span as WhetSpan

StatusCode = Literal["UNSET", "OK", "ERROR"]
AttributeValue = (
    str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
)
TraceState = dict[str, str]
NANOSECONDS = 1_000_000_000


class SpanContext(BaseModel):
    """The ids of a span."""

    model_config = ConfigDict(extra="allow")

    trace_id: str
    span_id: str
    is_remote: bool
    trace_state: TraceState


class TraceStatus(BaseModel):
    """The status of a span."""

    model_config = ConfigDict(extra="allow")

    status_code: StatusCode
    description: str | None = None


class Event(BaseModel):
    """An event within a span."""

    model_config = ConfigDict(extra="allow")

    name: str
    attributes: Attributes
    timestamp: float | None = None


class Link(BaseModel):
    """A link to another span."""

    model_config = ConfigDict(extra="allow")

    context: SpanContext
    attributes: Attributes | None = None


class OtelResource(BaseModel):
    """The OpenTelemetry resource, the process that emitted a span."""

    attributes: Attributes
    schema_url: str


class SpanCoreFields(BaseModel):
    """A span without ids, as emitters return it."""

    name: str
    status: TraceStatus
    attributes: Attributes
    start_time: float | None
    end_time: float | None


class Span(BaseModel):
    """A span of an attempt."""

    model_config = ConfigDict(extra="allow")

    rollout_id: str
    attempt_id: str
    sequence_id: int
    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    status: TraceStatus
    attributes: Attributes
    events: list[Event] = Field(default_factory=list[Event])
    links: list[Link] = Field(default_factory=list[Link])
    start_time: float | None
    end_time: float | None
    context: SpanContext | None = None
    parent: SpanContext | None = None
    resource: OtelResource

    @classmethod
    def from_attributes(
        cls,
        *,
        attributes: Attributes,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        sequence_id: int | None = None,
        name: str | None = None,
        trace_id: str | None = None,
        span_id: str | None = None,
        parent_id: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        resource: OtelResource | None = None,
        status: TraceStatus | None = None,
    ) -> Self:
        """Build a span from attributes; ids that are not passed are random."""
        trace_id = trace_id or secrets.token_hex(16)
        span_id = span_id or secrets.token_hex(8)
        return cls(
            rollout_id=rollout_id or "",
            attempt_id=attempt_id or "",
            sequence_id=sequence_id or 0,
            trace_id=trace_id,
            span_id=span_id,
            parent_id=parent_id,
            start_time=start_time,
            end_time=end_time,
            context=_build_context(trace_id, span_id),
            parent=_build_context(trace_id, parent_id) if parent_id else None,
            name=name or AGL_VIRTUAL,
            resource=resource or OtelResource(attributes={}, schema_url=""),
            attributes=attributes,
            status=status or TraceStatus(status_code="OK"),
            events=[],
            links=[],
        )

    @classmethod
    def from_core_fields(
        cls,
        core: SpanCoreFields,
        *,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        sequence_id: int | None = None,
    ) -> Self:
        """Build a span from one without ids."""
        return cls.from_attributes(
            attributes=core.attributes,
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=sequence_id,
            name=core.name,
            start_time=core.start_time or time.time(),
            end_time=core.end_time,
            status=core.status,
        )

    @classmethod
    def from_opentelemetry(
        cls, src: Any, rollout_id: str, attempt_id: str, sequence_id: int
    ) -> Self:
        """Convert a `ReadableSpan` of OpenTelemetry's SDK. Any: the SDK may be missing."""
        from whet.runners.tracers.otel import convert_span  # noqa: PLC0415 - needs the extra

        return cls.from_whet(convert_span(src), rollout_id, attempt_id, sequence_id)

    @classmethod
    def from_whet(
        cls, span: "WhetSpan", rollout_id: str, attempt_id: str, sequence_id: int
    ) -> Self:
        """Convert a span of our own."""
        code: StatusCode = {"unset": "UNSET", "ok": "OK", "error": "ERROR"}[span.status]  # type: ignore[assignment]
        made = cls.from_attributes(
            attributes=dict(span.attributes),
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=sequence_id,
            name=span.name,
            trace_id=span.trace_id,
            span_id=span.span_id,
            parent_id=span.parent_id,
            start_time=span.start / NANOSECONDS,
            end_time=span.end / NANOSECONDS,
            resource=OtelResource(attributes=dict(span.resource), schema_url=""),
            status=TraceStatus(status_code=code, description=span.message or None),
        )
        made.events = [
            Event(name=e.name, attributes=dict(e.attributes), timestamp=e.time / NANOSECONDS)
            for e in span.events
        ]
        return made


def _build_context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(trace_id=trace_id, span_id=span_id, is_remote=False, trace_state={})
