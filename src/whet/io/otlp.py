"""OTLP over HTTP: parse the spans of an export, store them with their attempts, and respond.

The attempt of a span is named by the span, by its sender, or by other spans of its trace.
"""

import json
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic.alias_generators import to_camel

from whet.errors import NotFound, RequestError
from whet.io import otlp_protobuf as protobuf
from whet.types import AttemptId, Span, SpanEvent

ATTEMPT = "whet.attempt"
"""Attribute of a span or of its resource, and entry of W3C baggage, that names the attempt."""

KINDS = ("internal", "internal", "server", "client", "producer", "consumer")
STATUSES = ("unset", "ok", "error")


class Encoding(StrEnum):
    """Content type of an export, and of the response to it."""

    PROTOBUF = "application/x-protobuf"
    JSON = "application/json"


class ExportedSpan(NamedTuple):
    """A span of an export."""

    span: Span
    attempt: str | None
    """The attempt that the span or its resource names."""


class Export(NamedTuple):
    """The spans of one request."""

    spans: list[ExportedSpan]
    invalid: list[str]
    """A reason for each span that is invalid."""


class Sender(NamedTuple):
    """The sender of an export."""

    attempt: AttemptId | None
    """The attempt of spans that do not name one."""
    is_bound: bool = False
    """Whether it may send spans of no other attempt."""


class IngestResult(NamedTuple):
    """Counts of an ingested export."""

    accepted: int
    rejected: int
    reason: str
    """The reasons, if any were rejected."""


RecordSpans = Callable[[AttemptId, Sequence[Span]], Awaitable[None]]
FindOwners = Callable[[Sequence[str]], Awaitable[dict[str, AttemptId]]]
"""The attempts of traces that were stored before, by trace id."""


T = TypeVar("T")

_List = Annotated[list[T], Field(fail_fast=True)]
"""A list of which the first invalid item is reported, and not each: there may be millions."""


class _Message(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, extra="ignore")


class _AnyValue(_Message):
    string_value: str | None = None
    bool_value: bool | None = None
    int_value: int | None = None
    double_value: float | None = None
    array_value: "_ArrayValue | None" = None
    kvlist_value: "_KeyValueList | None" = None
    bytes_value: str | None = None


class _KeyValue(_Message):
    key: str = ""
    value: _AnyValue = Field(default_factory=_AnyValue)


class _ArrayValue(_Message):
    values: _List[_AnyValue] = []


class _KeyValueList(_Message):
    values: _List[_KeyValue] = []


class _Attributed(_Message):
    attributes: _List[_KeyValue] = []

    def to_json(self) -> dict[str, JsonValue]:
        return {each.key: _to_json(each.value) for each in self.attributes}


class _Event(_Attributed):
    time_unix_nano: int = 0
    name: str = ""


class _Status(_Message):
    message: str = ""
    code: int = 0


class _Span(_Attributed):
    trace_id: str = ""
    span_id: str = ""
    parent_span_id: str = ""
    name: str = ""
    kind: int = 0
    start_time_unix_nano: int = 0
    end_time_unix_nano: int = 0
    events: _List[_Event] = []
    status: _Status = _Status()


class _Scope(_Message):
    name: str = ""


class _ScopeSpans(_Message):
    scope: _Scope = _Scope()
    spans: _List[_Span] = []


class _ResourceSpans(_Message):
    resource: _Attributed = _Attributed()
    scope_spans: _List[_ScopeSpans] = []


class _Request(_Message):
    resource_spans: _List[_ResourceSpans] = []


def parse_encoding(content_type: str) -> Encoding:
    """Return the encoding of a content type. Raises RequestError for an unsupported one."""
    kind = content_type.partition(";")[0].strip().lower()
    try:
        return Encoding(kind)
    except ValueError as error:
        known = " or ".join(Encoding)
        raise RequestError(
            f"send traces as {known}; found {kind or 'no content type'!r}"
        ) from error


def parse_export(body: bytes, encoding: Encoding) -> Export:
    """Parse the body of an export. Raises RequestError if it is invalid."""
    if encoding is Encoding.PROTOBUF:
        message: object = protobuf.read_message("ExportTraceServiceRequest", body)
    else:
        protobuf.check_message_count(body.count(b"{"))  # no fewer than its messages
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the export is not valid JSON: {error}") from error
    try:
        request = _Request.model_validate(message)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"invalid export of traces: {where}: {first['msg']}") from error
    export = Export([], [])
    for group in request.resource_spans:
        resource = group.resource.to_json()
        for scope in group.scope_spans:
            for each in scope.spans:
                _add_span(export, each, scope.scope.name, resource)
    return export


def _add_span(export: Export, sent: _Span, scope: str, resource: dict[str, JsonValue]) -> None:
    try:
        span = Span(
            trace_id=sent.trace_id.lower(),
            span_id=sent.span_id.lower(),
            parent_id=sent.parent_span_id.lower() or None,
            name=sent.name,
            kind=_look_up(KINDS, sent.kind),
            start=sent.start_time_unix_nano,
            end=sent.end_time_unix_nano,
            status=_look_up(STATUSES, sent.status.code),
            message=sent.status.message,
            attributes=sent.to_json(),
            events=tuple(
                SpanEvent(name=event.name, time=event.time_unix_nano, attributes=event.to_json())
                for event in sent.events
            ),
            scope=scope,
            resource=resource,
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        export.invalid.append(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
    else:
        attempt = span.attributes.get(ATTEMPT) or resource.get(ATTEMPT)
        export.spans.append(ExportedSpan(span, attempt if isinstance(attempt, str) else None))


def _look_up(names: tuple[str, ...], number: int) -> Any:  # Any: the literals of a span's field
    return names[number] if 0 <= number < len(names) else names[0]


def _to_json(value: _AnyValue) -> JsonValue:
    """Convert an attribute to JSON; bytes stay in base64."""
    if value.array_value is not None:
        return [_to_json(each) for each in value.array_value.values]
    if value.kvlist_value is not None:
        return {each.key: _to_json(each.value) for each in value.kvlist_value.values}
    number = value.double_value
    if number is not None:
        return number if math.isfinite(number) else str(number)
    for simple in (value.string_value, value.bool_value, value.int_value, value.bytes_value):
        if simple is not None:
            return simple
    return None


# --------------------------------------------------------------------------- ingest


async def ingest(
    export: Export, sender: Sender, record: RecordSpans, find_owners: FindOwners | None = None
) -> IngestResult:
    """Record the spans of an export with their attempts; those of no attempt are rejected."""
    reasons = list(export.invalid)
    named = [(each.span, AttemptId(each.attempt or sender.attempt or "")) for each in export.spans]
    traces = await _find_trace_owners(named, find_owners)
    by_attempt = defaultdict[AttemptId, list[Span]](list)
    for span, attempt in named:
        attempt = attempt or traces.get(span.trace_id)
        if not attempt:
            reasons.append(f"the span names no attempt: set the attribute {ATTEMPT!r} or use a key")
        elif sender.is_bound and attempt != sender.attempt:
            reasons.append(f"this API key does not belong to attempt {attempt!r}")
        else:
            by_attempt[attempt].append(span)
    accepted = 0
    for attempt, spans in by_attempt.items():
        try:
            await record(attempt, spans)
            accepted += len(spans)
        except NotFound as error:
            reasons += [str(error)] * len(spans)
    return IngestResult(accepted, len(reasons), "; ".join(dict.fromkeys(reasons))[:1000])


async def _find_trace_owners(
    named: Sequence[tuple[Span, AttemptId]], find_owners: FindOwners | None
) -> dict[str, AttemptId]:
    """Return the attempt of each trace that has exactly one."""
    found = defaultdict[str, set[AttemptId]](set)
    for span, attempt in named:
        if attempt:
            found[span.trace_id].add(attempt)
    unnamed = {span.trace_id for span, attempt in named if not attempt}
    unknown = sorted(unnamed - found.keys())
    known = await find_owners(unknown) if find_owners is not None and unknown else {}
    return known | {trace: min(owners) for trace, owners in found.items() if len(owners) == 1}


# --------------------------------------------------------------------------- responses


def build_response(encoding: Encoding, rejected: int = 0, reason: str = "") -> bytes:
    """Return the body of a response that accepts the export, except for the rejected spans."""
    if encoding is Encoding.JSON:
        partial = {"rejectedSpans": str(rejected), "errorMessage": reason}
        return json.dumps({"partialSuccess": partial} if rejected else {}).encode()
    partial = protobuf.write_varint(1, rejected) + protobuf.write_bytes(2, reason.encode())
    return protobuf.write_bytes(1, partial) if rejected else b""


def build_error(encoding: Encoding, reason: str) -> bytes:
    """Return the body of a response that rejects the whole export."""
    if encoding is Encoding.JSON:
        return json.dumps({"message": reason}).encode()
    return protobuf.write_bytes(2, reason.encode())
