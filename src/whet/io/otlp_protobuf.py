"""Protocol Buffers of exported traces, decoded into the JSON encoding of OTLP.

Both encodings of an export are then validated and read by the same code.
"""

import base64
import struct
from typing import Literal, NamedTuple

from pydantic import JsonValue

from whet.errors import RequestError

MAX_DEPTH = 64
"""Nested messages: attributes nest, but not so deep."""
MAX_MESSAGES = 1_000_000
"""Messages of one export, such as attributes, their values and events. An empty one has two bytes,
but takes a kilobyte of memory."""

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class Field(NamedTuple):
    """A field of a message: its name in JSON, and its type."""

    name: str
    kind: Literal["text", "hex", "base64", "int", "bool", "fixed", "double"] | str
    """Other values are names of messages."""
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
"""Fields of opentelemetry-proto 1.x that are read; others are skipped."""

WIRE_TYPES = {"int": VARINT, "bool": VARINT, "fixed": FIXED64, "double": FIXED64}
"""Wire types of fields that are not length-delimited."""


def read_message(name: str, data: bytes) -> dict[str, JsonValue]:
    """Decode a message of `MESSAGES` to its JSON. Raises RequestError if it is invalid."""
    return _Reader().read(name, data)


def check_message_count(messages: int) -> None:
    """Raise RequestError if an export has more messages than are read."""
    if messages > MAX_MESSAGES:
        raise RequestError(
            f"the export has more than {MAX_MESSAGES:,} attributes, values and events: "
            "send fewer spans at once"
        )


class _Reader:
    def __init__(self) -> None:
        self._messages = 0

    def read(self, name: str, data: bytes, depth: int = 0) -> dict[str, JsonValue]:
        self._messages += 1
        check_message_count(self._messages)
        if depth > MAX_DEPTH:
            raise RequestError(f"the export nests messages more than {MAX_DEPTH} deep")
        fields, found = MESSAGES[name], dict[str, JsonValue]()
        at = 0
        while at < len(data):
            key, at = _decode_varint(data, at)
            wire, field = key & 7, fields.get(key >> 3)
            raw, at = _read_field(data, at, wire)
            if field is None or wire != WIRE_TYPES.get(field.kind, BYTES):
                continue
            value = self._convert(field, raw, depth)
            if field.many:
                several = found.setdefault(field.name, [])
                assert isinstance(several, list)
                several.append(value)
            else:
                found[field.name] = value
        return found

    def _convert(self, field: Field, raw: int | bytes, depth: int) -> JsonValue:
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
                return self.read(message, raw, depth + 1)
            case _:
                raise AssertionError(field)


def _read_field(data: bytes, at: int, wire: int) -> tuple[int | bytes, int]:
    if wire == VARINT:
        return _decode_varint(data, at)
    if wire == BYTES:
        length, at = _decode_varint(data, at)
    elif wire in (FIXED64, FIXED32):
        length = 8 if wire == FIXED64 else 4
    else:
        raise RequestError(f"the export is not valid protobuf: wire type {wire}")
    if at + length > len(data):
        raise RequestError("the export is cut off")
    return data[at : at + length], at + length


def _decode_varint(data: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while shift < 64:
        if at >= len(data):
            raise RequestError("the export is cut off")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value & (2**64 - 1), at
    raise RequestError("the export is not valid protobuf: a varint of more than 64 bits")


def write_varint(field: int, value: int) -> bytes:
    """Encode a number as a field; empty for 0, as in protobuf."""
    return _encode_varint(field << 3 | VARINT) + _encode_varint(value) if value else b""


def write_bytes(field: int, value: bytes) -> bytes:
    """Encode text or a message as a field; empty for an empty value."""
    return _encode_varint(field << 3 | BYTES) + _encode_varint(len(value)) + value if value else b""


def _encode_varint(value: int) -> bytes:
    digits = bytearray()
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])
