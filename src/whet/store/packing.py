"""Numbers as little-endian BLOBs and values as JSON text, both read back exactly as they were."""

import json
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain, groupby

import pydantic_core
from pydantic import BaseModel, JsonValue

# `struct.pack` would copy all the numbers twice on the way.
_numbers = lru_cache(1024)(struct.Struct)


def unpack_tokens(blob: bytes) -> tuple[int, ...]:
    """What `pack_tokens` was given."""
    return struct.unpack(f"<{len(blob) // 4}i", blob)


def pack_floats(values: Sequence[float]) -> bytes:
    """Eight bytes each: training compares with the very number that was sampled."""
    return _numbers(f"<{len(values)}d").pack(*values)


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


def to_json(value: BaseModel | JsonValue | Sequence[JsonValue] | Mapping[str, JsonValue]) -> str:
    """JSON in ASCII; infinities and lone surrogates are kept. Refuses what is no JSON."""
    return _ENCODER.encode(value)


def checked_to_json(value: BaseModel | Sequence[JsonValue] | Mapping[str, JsonValue]) -> str:
    """The same of what is known to be JSON, in a quarter of the time; read back as it was."""
    try:
        return pydantic_core.to_json(value, inf_nan_mode="constants").decode()
    except pydantic_core.PydanticSerializationError:  # a lone surrogate, or nested very deeply
        return to_json(value)


def _fields(value: object) -> dict[str, object]:
    if isinstance(value, BaseModel):
        return vars(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_fields)
