"""Writes the small GGUF files the tests read."""

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

UINT32, FLOAT32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8
ALIGNMENT = 32


class Stored(NamedTuple):
    """A tensor as it lies in the file."""

    shape: Sequence[int]
    type: int
    data: bytes


def plain(values: np.ndarray) -> Stored:
    return Stored(values.shape, F32, values.astype("<f4").tobytes())


def gguf(values: Mapping[str, object], tensors: Mapping[str, Stored], *, version: int = 3) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values))
    for key, value in values.items():
        header += string(key) + struct.pack("<I", code(value)) + body(value)
    data = b""
    for name, tensor in tensors.items():
        dims = tuple(tensor.shape)[::-1]
        header += string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        header += struct.pack("<IQ", tensor.type, len(data))
        data += padded(tensor.data)
    return padded(header) + data


def code(value: object) -> int:
    kinds = {bool: BOOL, int: UINT32, float: FLOAT32, str: STRING, list: ARRAY}
    return kinds[type(value)]


def body(value: object) -> bytes:
    match value:
        case str():
            return string(value)
        case list():
            return struct.pack("<IQ", code(value[0]), len(value)) + b"".join(map(body, value))
        case bool():
            return struct.pack("<?", value)
        case float():
            return struct.pack("<f", value)
        case _:
            return struct.pack("<I", value)


def string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)
