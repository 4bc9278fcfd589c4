"""Numbers as little-endian BLOBs and values as JSON text, both read back exactly as they were."""

import json
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain, groupby
from typing import TypeVar

from pydantic import BaseModel, JsonValue

V = TypeVar("V", bound=BaseModel)


def pack_ints(values: Sequence[int]) -> bytes:
    """Four bytes each, as `digest_tokens` counts them; a larger number is a struct.error."""
    return struct.pack(f"<{len(values)}i", *values)


def unpack_ints(blob: bytes) -> tuple[int, ...]:
    """What `pack_ints` was given."""
    return struct.unpack(f"<{len(blob) // 4}i", blob)


def pack_floats(values: Sequence[float]) -> bytes:
    """Eight bytes each: training compares with the very number that was sampled."""
    return struct.pack(f"<{len(values)}d", *values)


def unpack_floats(blob: bytes) -> tuple[float, ...]:
    """What `pack_floats` was given."""
    return struct.unpack(f"<{len(blob) // 8}d", blob)


def pack_runs(values: Sequence[int]) -> bytes:
    """Pairs of a value and how often it repeats: most generations have a single version."""
    if values and values.count(values[0]) == len(values):
        return struct.pack("<qq", values[0], len(values))
    runs = [(value, len(list(run))) for value, run in groupby(values)]
    return struct.pack(f"<{2 * len(runs)}q", *chain.from_iterable(runs))


def unpack_runs(blob: bytes) -> tuple[int, ...]:
    """What `pack_runs` was given."""
    values: tuple[int, ...] = ()
    for value, length in struct.iter_unpack("<qq", blob):
        values += (value,) * length
    return values


def build(kind: type[V], **fields: object) -> V:
    """A value that was checked before it was written, with all its fields.

    `model_construct` does the same in four times as long; this is how values are unpickled.
    """
    value = kind.__new__(kind)
    value.__setstate__(
        {
            "__dict__": fields,
            "__pydantic_fields_set__": _names(kind),
            "__pydantic_extra__": None,
            "__pydantic_private__": None,
        }
    )
    return value


@cache
def _names(kind: type[BaseModel]) -> set[str]:
    return set(kind.model_fields)


def to_json(value: BaseModel | JsonValue | Sequence[JsonValue] | Mapping[str, JsonValue]) -> str:
    """JSON in ASCII. Keeps what pydantic's own loses: infinities and lone surrogates."""
    return _ENCODER.encode(value)


def _fields(value: object) -> dict[str, object]:
    if isinstance(value, BaseModel):
        return vars(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_fields)
