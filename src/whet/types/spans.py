"""OpenTelemetry spans that agents and their frameworks report."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from whet.types.rollouts import Value

TraceId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
SpanId = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Nanoseconds = Annotated[int, Field(ge=0, lt=2**63)]
"""Nanoseconds since the epoch."""
Attributes = dict[str, JsonValue]


class SpanEvent(Value):
    """An event within a span."""

    name: str
    time: Nanoseconds
    attributes: Attributes = Field(default_factory=Attributes)


class Span(Value):
    """An OpenTelemetry span of an attempt, identified by its two ids: ingesting twice keeps one."""

    trace_id: TraceId
    span_id: SpanId
    parent_id: SpanId | None = None
    name: str
    kind: Literal["internal", "server", "client", "producer", "consumer"] = "internal"
    start: Nanoseconds
    end: Nanoseconds
    status: Literal["unset", "ok", "error"] = "unset"
    message: str = ""
    """Description of the error, if the status is `error`."""
    attributes: Attributes = Field(default_factory=Attributes)
    """Attributes as received; `gen_ai.*` keeps the names of the semantic conventions."""
    events: tuple[SpanEvent, ...] = ()
    scope: str = ""
    """Name of the instrumentation scope."""
    resource: Attributes = Field(default_factory=Attributes)
    """Attributes of the OpenTelemetry resource, the process that emitted it."""
