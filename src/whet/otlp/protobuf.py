"""Protocol Buffers, as far as exported traces need them: read into the shape of their JSON.

OTLP has one meaning and two encodings. What is read here looks as if it had come as JSON, so that
only one of them has to be understood.
"""

import base64
import struct
from typing import Literal, NamedTuple

from pydantic import JsonValue

from whet.errors import RequestError

DEEPEST = 64
"""Messages inside each other: attributes nest, and nobody nests them so far."""

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class Field(NamedTuple):
    """A field of a message: its name in JSON, and what it is."""

    name: str
    kind: Literal["text", "hex", "base64", "int", "bool", "fixed", "double"] | str
    """Any other is the name of a message."""
    many: bool = False


MESSAGES: dict[str, dict[int, Field]] = {
    "ExportTraceServiceRequest": {1: Field("resourceSpans", "ResourceSpans", many=True)},
    "ResourceSpans": {
        1: Field("resource", "Resource"),
        2: Field("scopeSpans", "ScopeSpans", many=True),
    },
    "Resource": {1: Field("attributes", "KeyValue", many=True)},
    "ScopeSpans": {1: Field("scope", "Scope"), 2: Field("spans", "Span", many=True)},
    "Scope": {1: Field("name", "text"), 2: Field("version", "text")},
    "Span": {
        1: Field("traceId", "hex"),
        2: Field("spanId", "hex"),
        4: Field("parentSpanId", "hex"),
        5: Field("name", "text"),
        6: Field("kind", "int"),
        7: Field("startTimeUnixNano", "fixed"),
        8: Field("endTimeUnixNano", "fixed"),
        9: Field("attributes", "KeyValue", many=True),
        11: Field("events", "Event", many=True),
        15: Field("status", "Status"),
    },
    "Event": {
        1: Field("timeUnixNano", "fixed"),
        2: Field("name", "text"),
        3: Field("attributes", "KeyValue", many=True),
    },
    "Status": {2: Field("message", "text"), 3: Field("code", "int")},
    "KeyValue": {1: Field("key", "text"), 2: Field("value", "AnyValue")},
    "AnyValue": {
        1: Field("stringValue", "text"),
        2: Field("boolValue", "bool"),
        3: Field("intValue", "int"),
        4: Field("doubleValue", "double"),
        5: Field("arrayValue", "ArrayValue"),
        6: Field("kvlistValue", "KeyValueList"),
        7: Field("bytesValue", "base64"),
    },
    "ArrayValue": {1: Field("values", "AnyValue", many=True)},
    "KeyValueList": {1: Field("values", "KeyValue", many=True)},
}
"""Of opentelemetry-proto 1.x, the fields that are kept; whatever else comes is passed over."""

WIRE_TYPES = {"int": VARINT, "bool": VARINT, "fixed": FIXED64, "double": FIXED64}
"""How fields travel, if not as so many bytes."""


def read_message(name: str, data: bytes, depth: int = 0) -> dict[str, JsonValue]:
    """A message of `MESSAGES`, as its JSON would be. Raises RequestError for what is none."""
    if depth > DEEPEST:
        raise RequestError(f"the export nests messages more than {DEEPEST} deep")
    fields, found = MESSAGES[name], dict[str, JsonValue]()
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire, field = key & 7, fields.get(key >> 3)
        raw, at = _raw(data, at, wire)
        if field is None or wire != WIRE_TYPES.get(field.kind, BYTES):
            continue
        value = _value(field, raw, depth)
        if field.many:
            several = found.setdefault(field.name, [])
            assert isinstance(several, list)
            several.append(value)
        else:
            found[field.name] = value
    return found


def _value(field: Field, raw: int | bytes, depth: int) -> JsonValue:
    match field.kind, raw:
        case "int", int():
            return raw - 2**64 if raw >= 2**63 else raw
        case "bool", int():
            return bool(raw)
        case "fixed", bytes():
            return int.from_bytes(raw, "little")
        case "double", bytes():
            return struct.unpack("<d", raw)[0]
        case "hex", bytes():
            return raw.hex()
        case "base64", bytes():
            return base64.b64encode(raw).decode()
        case "text", bytes():
            return raw.decode(errors="replace")
        case message, bytes():
            return read_message(message, raw, depth + 1)
        case _:
            raise AssertionError(field)


def _raw(data: bytes, at: int, wire: int) -> tuple[int | bytes, int]:
    if wire == VARINT:
        return _varint(data, at)
    if wire == BYTES:
        length, at = _varint(data, at)
    elif wire in (FIXED64, FIXED32):
        length = 8 if wire == FIXED64 else 4
    else:
        raise RequestError(f"the export is no protobuf of traces: wire type {wire}")
    if at + length > len(data):
        raise RequestError("the export is cut off")
    return data[at : at + length], at + length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while shift < 64:
        if at >= len(data):
            raise RequestError("the export is cut off")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value & (2**64 - 1), at
    raise RequestError("the export is no protobuf of traces: a number without end")


def write_varint(field: int, value: int) -> bytes:
    """A field that is a number; none where it is 0, as protobuf has it."""
    return _number(field << 3 | VARINT) + _number(value) if value else b""


def write_bytes(field: int, value: bytes) -> bytes:
    """A field that is text or a message; none where it is empty."""
    return _number(field << 3 | BYTES) + _number(len(value)) + value if value else b""


def _number(value: int) -> bytes:
    digits = bytearray()
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])
