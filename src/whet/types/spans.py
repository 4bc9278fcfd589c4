"""What agents and their frameworks tell of their own work, in OpenTelemetry's terms."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from whet.types.work import Value

TraceId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
SpanId = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Nanoseconds = Annotated[int, Field(ge=0, lt=2**63)]
"""Since the epoch."""
Attributes = dict[str, JsonValue]


class SpanEvent(Value):
    """Something that happened while a span was open."""

    name: str
    time: Nanoseconds
    attributes: Attributes = Field(default_factory=Attributes)


class Span(Value):
    """One piece of an attempt's work. Its two ids tell it from every other: twice is once."""

    trace_id: TraceId
    span_id: SpanId
    parent_id: SpanId | None = None
    name: str
    kind: Literal["internal", "server", "client", "producer", "consumer"] = "internal"
    start: Nanoseconds
    end: Nanoseconds
    status: Literal["unset", "ok", "error"] = "unset"
    message: str = ""
    """Why, of one that ended in an error."""
    attributes: Attributes = Field(default_factory=Attributes)
    """As they came: `gen_ai.*` keeps the names of the conventions."""
    events: tuple[SpanEvent, ...] = ()
    scope: str = ""
    """The instrumentation that made it."""
    resource: Attributes = Field(default_factory=Attributes)
    """The process it came from."""
