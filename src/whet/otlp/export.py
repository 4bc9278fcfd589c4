"""What an exporter of OpenTelemetry sends to `/v1/traces`, and what it is answered."""

import json
import math
from enum import StrEnum
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic.alias_generators import to_camel

from whet.errors import RequestError
from whet.otlp import protobuf
from whet.types import Span, SpanEvent

ATTEMPT = "whet.attempt"
"""The attribute of a span or of its resource, and the entry of W3C baggage, that names the attempt
it belongs to."""

KINDS = ("internal", "internal", "server", "client", "producer", "consumer")
STATUSES = ("unset", "ok", "error")


class Encoding(StrEnum):
    """How an export is written, and so its answer: the content types."""

    PROTOBUF = "application/x-protobuf"
    JSON = "application/json"


class Sent(NamedTuple):
    """A span as it came."""

    span: Span
    attempt: str | None
    """Whose it says it is, or its resource does."""


class Export(NamedTuple):
    """What came in one request."""

    spans: list[Sent]
    broken: list[str]
    """Why others of it are no spans."""


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
    values: list[_AnyValue] = []


class _KeyValueList(_Message):
    values: list[_KeyValue] = []


class _Attributed(_Message):
    attributes: list[_KeyValue] = []

    def plain(self) -> dict[str, JsonValue]:
        return {each.key: _plain(each.value) for each in self.attributes}


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
    events: list[_Event] = []
    status: _Status = _Status()


class _Scope(_Message):
    name: str = ""


class _ScopeSpans(_Message):
    scope: _Scope = _Scope()
    spans: list[_Span] = []


class _ResourceSpans(_Message):
    resource: _Attributed = _Attributed()
    scope_spans: list[_ScopeSpans] = []


class _Request(_Message):
    resource_spans: list[_ResourceSpans] = []


def encoding_of(content_type: str) -> Encoding:
    """How a body of this content type is written. Raises RequestError for one we cannot read."""
    kind = content_type.partition(";")[0].strip().lower()
    try:
        return Encoding(kind)
    except ValueError as error:
        known = " or ".join(Encoding)
        raise RequestError(f"traces are sent as {known}; found {kind or 'no type'!r}") from error


def read_export(body: bytes, encoding: Encoding) -> Export:
    """The spans of a body. Raises RequestError if it is no export."""
    if encoding is Encoding.PROTOBUF:
        told: object = protobuf.read_message("ExportTraceServiceRequest", body)
    else:
        try:
            told = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the export is no JSON: {error}") from error
    try:
        request = _Request.model_validate(told)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"the export is none of traces: {where}: {first['msg']}") from error
    export = Export([], [])
    for group in request.resource_spans:
        resource = group.resource.plain()
        for scope in group.scope_spans:
            for each in scope.spans:
                _add(export, each, scope.scope.name, resource)
    return export


def _add(export: Export, sent: _Span, scope: str, resource: dict[str, JsonValue]) -> None:
    try:
        span = Span(
            trace_id=sent.trace_id.lower(),
            span_id=sent.span_id.lower(),
            parent_id=sent.parent_span_id.lower() or None,
            name=sent.name,
            kind=_one_of(KINDS, sent.kind),
            start=sent.start_time_unix_nano,
            end=sent.end_time_unix_nano,
            status=_one_of(STATUSES, sent.status.code),
            message=sent.status.message,
            attributes=sent.plain(),
            events=tuple(
                SpanEvent(name=event.name, time=event.time_unix_nano, attributes=event.plain())
                for event in sent.events
            ),
            scope=scope,
            resource=resource,
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        export.broken.append(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
    else:
        named = span.attributes.get(ATTEMPT) or resource.get(ATTEMPT)
        export.spans.append(Sent(span, named if isinstance(named, str) else None))


def _one_of(names: tuple[str, ...], number: int) -> Any:  # Any: the literals of a span's field
    return names[number] if 0 <= number < len(names) else names[0]


def _plain(value: _AnyValue) -> JsonValue:
    """An attribute as plain JSON; bytes are left in base64."""
    if value.array_value is not None:
        return [_plain(each) for each in value.array_value.values]
    if value.kvlist_value is not None:
        return {each.key: _plain(each.value) for each in value.kvlist_value.values}
    number = value.double_value
    if number is not None:
        return number if math.isfinite(number) else str(number)
    for simple in (value.string_value, value.bool_value, value.int_value, value.bytes_value):
        if simple is not None:
            return simple
    return None


# --------------------------------------------------------------------------- answers


def answer(encoding: Encoding, rejected: int = 0, why: str = "") -> bytes:
    """That the export was taken, all of it or but for so many spans."""
    if encoding is Encoding.JSON:
        partial = {"rejectedSpans": str(rejected), "errorMessage": why}
        return json.dumps({"partialSuccess": partial} if rejected else {}).encode()
    partial = protobuf.write_varint(1, rejected) + protobuf.write_bytes(2, why.encode())
    return protobuf.write_bytes(1, partial) if rejected else b""


def refusal(encoding: Encoding, why: str) -> bytes:
    """That nothing of it was taken."""
    if encoding is Encoding.JSON:
        return json.dumps({"message": why}).encode()
    return protobuf.write_bytes(2, why.encode())
