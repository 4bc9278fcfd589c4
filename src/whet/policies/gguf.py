"""A reader of GGUF files: metadata, and tensors as float32.

Knows the four tensor types our models use and refuses the rest by name. Every length in the file
is checked before it is trusted, so a damaged file is an error and never a wrong weight.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from whet.errors import ConfigError

Scalar = str | int | float
Value = Scalar | list[Scalar]
Weights = NDArray[np.float32]
T = TypeVar("T")

MAGIC = b"GGUF"
VERSIONS = (2, 3)
"""The two share one layout; version 1 had shorter lengths."""
STRING, ARRAY = 8, 9
NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""Metadata types that have a fixed size, as numpy writes them."""


class TensorType(NamedTuple):
    """How a tensor is stored: blocks of `values` numbers, each laid out as `block`."""

    name: str
    values: int
    block: np.dtype[np.void]


TENSOR_TYPES = {
    0: TensorType("F32", 1, np.dtype([("x", "<f4")])),
    1: TensorType("F16", 1, np.dtype([("x", "<f2")])),
    3: TensorType("Q4_1", 32, np.dtype([("scale", "<f2"), ("least", "<f2"), ("q", "u1", 16)])),
    8: TensorType("Q8_0", 32, np.dtype([("scale", "<f2"), ("q", "i1", 32)])),
}


class Tensor(NamedTuple):
    """Where a tensor lies in the file."""

    type: TensorType
    shape: tuple[int, ...]
    """Outermost first, as numpy counts; the file has it the other way round."""
    start: int


@dataclass(frozen=True, slots=True)
class GGUF:
    """A parsed file. Tensors are decoded when asked for, so that only one need be in memory."""

    data: bytes
    metadata: Mapping[str, Value]
    tensors: Mapping[str, Tensor]

    def weights(self, name: str) -> Weights:
        """The tensor `name`, decoded. Raises ConfigError if the file has none of that name."""
        if name not in self.tensors:
            raise ConfigError(f"the GGUF has no tensor {name!r}: it holds another model")
        kind, shape, start = self.tensors[name]
        count = math.prod(shape) // kind.values
        blocks = np.frombuffer(self.data, kind.block, count, start)
        return _decode(kind, blocks).reshape(shape)

    def text(self, key: str) -> str:
        """The string under `key`."""
        return _expect(key, self.metadata.get(key), str)

    def integer(self, key: str) -> int:
        """The integer under `key`."""
        return _expect(key, self.metadata.get(key), int)

    def number(self, key: str) -> float:
        """The float under `key`."""
        return _expect(key, self.metadata.get(key), float)

    def texts(self, key: str) -> list[str]:
        """The strings under `key`."""
        return [_expect(key, item, str) for item in self._list(key)]

    def integers(self, key: str) -> list[int]:
        """The integers under `key`."""
        return [_expect(key, item, int) for item in self._list(key)]

    def _list(self, key: str) -> list[Scalar]:
        items = self.metadata.get(key)
        if not isinstance(items, list):
            raise ConfigError(_mismatch(key, "list", items))
        return items


def parse(data: bytes) -> GGUF:
    """Read the header of a GGUF file. Raises ConfigError if it is not one, or not a whole one."""
    if data[:4] != MAGIC:
        raise ConfigError(f"not a GGUF file: expected it to begin with {MAGIC!r}, got {data[:4]!r}")
    cursor = _Cursor(data, len(MAGIC))
    version = cursor.integer("<I")
    if version not in VERSIONS:
        raise ConfigError(f"GGUF version {version} cannot be read: expected 2 or 3")
    tensor_count, value_count = cursor.integer("<Q"), cursor.integer("<Q")
    metadata: dict[str, Value] = {}
    for _ in range(value_count):
        key = cursor.string()
        metadata[key] = cursor.value(key)
    found = [cursor.tensor() for _ in range(tensor_count)]
    base = _aligned(cursor.at, metadata.get("general.alignment", 32))
    tensors = {name: tensor._replace(start=base + tensor.start) for name, tensor in found}
    if len(tensors) < len(found):
        raise ConfigError("the GGUF is damaged: two tensors have the same name")
    for name, (kind, shape, start) in tensors.items():
        end = start + math.prod(shape) // kind.values * kind.block.itemsize
        if end > len(data):
            raise ConfigError(_truncated(f"tensor {name!r}", end, len(data)))
    return GGUF(data, metadata, tensors)


class _Cursor:
    """A place in the file; every read moves it on and checks that the bytes are there."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self.at = at

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self._data):
            raise ConfigError(_truncated("the header", end, len(self._data)))
        taken = self._data[self.at : end]
        self.at = end
        return taken

    def integer(self, form: str) -> int:
        (number,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return int(number)

    def string(self) -> str:
        try:
            return self.take(self.integer("<Q")).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"the GGUF is damaged: a string is not UTF-8: {error}") from error

    def value(self, key: str) -> Value:
        code = self.integer("<I")
        if code != ARRAY:
            return self._values(key, code, 1)[0]
        element = self.integer("<I")
        return self._values(key, element, self.integer("<Q"))

    def _values(self, key: str, code: int, count: int) -> list[Scalar]:
        if code == STRING:
            return [self.string() for _ in range(count)]
        if code not in NUMBERS:
            raise ConfigError(f"GGUF key {key!r} has a value of type {code}, which cannot be read")
        number = np.dtype(NUMBERS[code])
        return np.frombuffer(self.take(count * number.itemsize), number).tolist()

    def tensor(self) -> tuple[str, Tensor]:
        """The next tensor, its start counted from where the tensors begin."""
        name = self.string()
        shape = tuple(self.integer("<Q") for _ in range(self.integer("<I")))[::-1]
        code, start = self.integer("<I"), self.integer("<Q")
        kind = TENSOR_TYPES.get(code)
        if kind is None:
            known = ", ".join(known.name for known in TENSOR_TYPES.values())
            raise ConfigError(f"GGUF tensor {name!r} has type {code}, expected one of {known}")
        if not shape or shape[-1] % kind.values:
            raise ConfigError(
                f"the GGUF is damaged: tensor {name!r} has shape {shape}, "
                f"but {kind.name} comes in rows of a multiple of {kind.values}"
            )
        return name, Tensor(kind, shape, start)


def _decode(kind: TensorType, blocks: NDArray[np.void]) -> Weights:
    match kind.name:
        case "Q8_0":
            return blocks["scale"].astype(np.float32)[:, None] * blocks["q"].astype(np.float32)
        case "Q4_1":
            # A byte holds two numbers of the block: one of its first half, one of its second.
            nibbles = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1)
            scaled = nibbles.astype(np.float32) * blocks["scale"].astype(np.float32)[:, None]
            return scaled + blocks["least"].astype(np.float32)[:, None]
        case _:
            return blocks["x"].astype(np.float32)


def _expect(key: str, value: Value | None, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise ConfigError(_mismatch(key, kind.__name__, value))
    return value


def _mismatch(key: str, expected: str, value: Value | None) -> str:
    found = "nothing" if value is None else type(value).__name__
    return f"GGUF key {key!r}: expected {expected}, found {found}"


def _aligned(position: int, alignment: Value) -> int:
    if not isinstance(alignment, int) or alignment <= 0:
        raise ConfigError(f"the GGUF is damaged: its alignment is {alignment!r}")
    return math.ceil(position / alignment) * alignment


def _truncated(what: str, end: int, size: int) -> str:
    return f"the GGUF is cut short: {what} ends at byte {end}, but the file has {size}"
