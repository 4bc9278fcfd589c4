"""Calls as the tables hold them, and as they travel: numbers packed, values as JSON text."""

import json
from functools import lru_cache
from typing import NamedTuple

from pydantic import ValidationError

from whet.errors import StoreError, boundary
from whet.store.packing import (
    checked_to_json,
    pack_floats,
    pack_runs,
    unpack_floats,
    unpack_runs,
    unpack_tokens,
)
from whet.types import (
    Attempt,
    AttemptId,
    Call,
    CallId,
    Generation,
    Origin,
    Reward,
    Rollout,
    Sampling,
    Trajectory,
    pack_tokens,
)


class CallRow(NamedTuple):
    """What a call's row has besides the attempt and the id."""

    parent: str | None
    root: str
    messages: str
    context: bytes
    prompt_length: int
    prompt_digest: str
    created: float
    origin: str


class GenerationRow(NamedTuple):
    """What a generation's row has besides the call."""

    stop: str
    sampling: str
    message: str
    versions: bytes
    tokens: bytes
    logprobs: bytes


class PackedCall(NamedTuple):
    """A call with its generations."""

    attempt: AttemptId
    id: CallId
    row: CallRow
    generations: list[GenerationRow]


class PackedTrajectory(NamedTuple):
    """A succeeded attempt with what happened in it."""

    attempt: AttemptId
    number: int
    rollout: str
    resources: str | None
    reward: float
    rewards: list[Reward]
    calls: list[PackedCall]


def pack_call(call: Call) -> PackedCall:
    """Raises StoreError if a number or a text of it cannot be stored."""
    with boundary(StoreError, f"call {call.id!r} cannot be stored"):
        return PackedCall(
            call.attempt,
            call.id,
            CallRow(
                call.parent,
                call.root,
                checked_to_json(call.messages),
                pack_tokens(call.context),
                call.prompt_length,
                call.prompt_digest,
                call.created,
                checked_to_json(call.origin),
            ),
            [_pack_generation(generation) for generation in call.generations],
        )


def _pack_generation(generation: Generation) -> GenerationRow:
    return GenerationRow(
        generation.stop,
        _sampling_text(generation.sampling),  # pyright: ignore[reportArgumentType]
        checked_to_json(generation.message),
        pack_runs(generation.versions),
        pack_tokens(generation.tokens),
        pack_floats(generation.logprobs),
    )


def unpack_call(packed: PackedCall) -> Call:
    """The call as it was. It was checked when it was written, and is not checked again."""
    row = packed.row
    return Call.unchecked(
        id=packed.id,
        attempt=packed.attempt,
        parent=row.parent,
        root=row.root,
        messages=tuple(json.loads(row.messages)),
        context=unpack_tokens(row.context),
        prompt_length=row.prompt_length,
        prompt_digest=row.prompt_digest,
        generations=tuple(_unpack_generation(each) for each in packed.generations),
        created=row.created,
        origin=Origin.model_validate(json.loads(row.origin)),
    )


def _unpack_generation(row: GenerationRow) -> Generation:
    return Generation.unchecked(
        tokens=unpack_tokens(row.tokens),
        logprobs=unpack_floats(row.logprobs),
        versions=unpack_runs(row.versions),
        stop=row.stop,
        sampling=_sampling(row.sampling),
        message=json.loads(row.message),
    )


def unpack_trajectory(packed: PackedTrajectory) -> Trajectory:
    """The trajectory as it was."""
    return Trajectory.unchecked(
        attempt=Attempt.unchecked(
            id=packed.attempt,
            rollout=parse_rollout(packed.rollout),
            number=packed.number,
            resources=parse_resources(packed.resources),
        ),
        calls=tuple(unpack_call(call) for call in packed.calls),
        rewards=tuple(packed.rewards),
        reward=packed.reward,
    )


def parse_rollout(body: str) -> Rollout:
    """A stored rollout."""
    try:
        return Rollout.model_validate_json(body)
    except ValidationError:  # a lone surrogate, or nested very deeply: Python's parser takes it
        return Rollout.model_validate(json.loads(body))


def parse_resources(text: str | None) -> dict[str, int]:
    """The versions that an attempt was given."""
    return json.loads(text) if text else {}


@lru_cache(1024)
def _sampling_text(sampling: Sampling) -> str:  # frozen, which gives it a hash
    return checked_to_json(sampling)


@lru_cache(1024)
def _sampling(text: str) -> Sampling:
    return Sampling.model_validate(json.loads(text))
