"""Codec of stored values: numbers as little-endian BLOBs, everything else as JSON text.

Both are read back exactly as they were written.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain, groupby
from typing import NamedTuple

import pydantic_core
from pydantic import BaseModel, JsonValue, ValidationError

from whet.errors import StoreError, boundary
from whet.types import (
    AttemptId,
    Call,
    CallId,
    Generation,
    Origin,
    Rollout,
    Sampling,
    pack_tokens,
)


class CallRow(NamedTuple):
    """Columns of a call, except its attempt and its id."""

    parent: str | None
    root: str
    messages: str
    prompt_suffix: bytes
    prompt_length: int
    prompt_digest: str
    created: float
    origin: str


class GenerationRow(NamedTuple):
    """Columns of a generation, except its call."""

    stop: str
    sampling: str
    message: str
    versions: bytes
    tokens: bytes
    logprobs: bytes


class PackedCall(NamedTuple):
    """A call with its generations, as the tables hold them."""

    attempt: AttemptId
    id: CallId
    row: CallRow
    generations: list[GenerationRow]


def pack_call(call: Call) -> PackedCall:
    """Encode a call. Raises StoreError if one of its numbers or texts cannot be stored."""
    with boundary(StoreError, f"call {call.id!r} cannot be stored"):
        return PackedCall(
            call.attempt,
            call.id,
            CallRow(
                call.parent,
                call.root,
                to_json_fast(call.messages),
                pack_tokens(call.prompt_suffix),
                call.prompt_length,
                call.prompt_digest,
                call.created,
                to_json_fast(call.origin),
            ),
            [_pack_generation(generation) for generation in call.generations],
        )


def _pack_generation(generation: Generation) -> GenerationRow:
    return GenerationRow(
        generation.stop,
        _pack_sampling(generation.sampling),  # pyright: ignore[reportArgumentType]
        to_json_fast(generation.message),
        pack_runs(generation.versions),
        pack_tokens(generation.tokens),
        pack_floats(generation.logprobs),
    )


def unpack_call(packed: PackedCall) -> Call:
    """Decode a call, without validation: it was validated when it was written."""
    row = packed.row
    return Call.unchecked(
        id=packed.id,
        attempt=packed.attempt,
        parent=row.parent,
        root=row.root,
        messages=tuple(json.loads(row.messages)),
        prompt_suffix=unpack_tokens(row.prompt_suffix),
        prompt_length=row.prompt_length,
        prompt_digest=row.prompt_digest,
        generations=tuple(map(_unpack_generation, packed.generations)),
        created=row.created,
        origin=Origin.model_validate(json.loads(row.origin)),
    )


def _unpack_generation(row: GenerationRow) -> Generation:
    return Generation.unchecked(
        tokens=unpack_tokens(row.tokens),
        logprobs=unpack_floats(row.logprobs),
        versions=unpack_runs(row.versions),
        stop=row.stop,
        sampling=_unpack_sampling(row.sampling),
        message=json.loads(row.message),
    )


def parse_rollout(body: str) -> Rollout:
    """Decode a rollout."""
    try:
        return Rollout.model_validate_json(body)
    except ValidationError:  # a lone surrogate or deep nesting, which Python's own parser reads
        return Rollout.model_validate(json.loads(body))


def parse_resources(text: str | None) -> dict[str, int]:
    """Decode the resource versions of an attempt."""
    return json.loads(text) if text else {}


@lru_cache(1024)
def _pack_sampling(sampling: Sampling) -> str:  # hashable, since it is frozen
    return to_json_fast(sampling)


@lru_cache(1024)
def _unpack_sampling(text: str) -> Sampling:
    return Sampling.model_validate(json.loads(text))


# ------------------------------------------------------------------ numbers and JSON

# `struct.pack` parses its format and copies the numbers once more; a prepared Struct does not.
_struct = lru_cache(1024)(struct.Struct)


def unpack_tokens(blob: bytes) -> tuple[int, ...]:
    """Invert `pack_tokens`."""
    return struct.unpack(f"<{len(blob) // 4}i", blob)


def pack_floats(values: Sequence[float]) -> bytes:
    """Encode as float64: training compares with exactly the number that was sampled."""
    return _struct(f"<{len(values)}d").pack(*values)


def unpack_floats(blob: bytes) -> tuple[float, ...]:
    """Invert `pack_floats`."""
    return struct.unpack(f"<{len(blob) // 8}d", blob)


def pack_runs(values: Sequence[int]) -> bytes:
    """Run-length encode: most generations have a single policy version."""
    if values and values.count(values[0]) == len(values):
        return struct.pack("<qq", values[0], len(values))
    runs = [(value, len(list(run))) for value, run in groupby(values)]
    return struct.pack(f"<{2 * len(runs)}q", *chain.from_iterable(runs))


def unpack_runs(blob: bytes) -> tuple[int, ...]:
    """Invert `pack_runs`."""
    values: tuple[int, ...] = ()
    for value, length in struct.iter_unpack("<qq", blob):
        values += (value,) * length
    return values


def to_json(value: BaseModel | JsonValue | Sequence[JsonValue] | Mapping[str, JsonValue]) -> str:
    """Encode as ASCII JSON; keeps infinities and lone surrogates. Raises TypeError."""
    return _ENCODER.encode(value)


def to_json_fast(value: BaseModel | Sequence[JsonValue] | Mapping[str, JsonValue]) -> str:
    """Encode values already known to be JSON, in a quarter of the time of `to_json`."""
    try:
        return pydantic_core.to_json(value, inf_nan_mode="constants").decode()
    except pydantic_core.PydanticSerializationError:  # a lone surrogate or deep nesting
        return to_json(value)


def _list_fields(value: object) -> dict[str, object]:
    if isinstance(value, BaseModel):
        return vars(value)
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_list_fields)
