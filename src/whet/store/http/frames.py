"""Calls as bodies: a JSON head, then all numbers as the store packs them.

A frame is the length of the head in four bytes, the head, and the numbers that it counts, so a
token costs its bytes and no parsing.
"""

import json
import struct
from collections.abc import Iterable, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple, cast

from pydantic import JsonValue

from whet.store.http.problems import Malformed
from whet.store.http.wire import CallHead, CallsHead, GenerationHead, parse_json
from whet.store.packed import CallRow, GenerationRow, PackedCall, PackedTrajectory
from whet.store.packing import checked_to_json, to_json, unpack_floats, unpack_runs, unpack_tokens
from whet.types import (
    Attempt,
    AttemptId,
    Call,
    CallId,
    Generation,
    Origin,
    Reward,
    Sampling,
    Trajectory,
)

FRAMED = "application/vnd.whet.calls"
LENGTH = struct.Struct("<I")


class Framed(NamedTuple):
    """A part of a head, and the numbers it counts."""

    head: str
    numbers: bytes


# --------------------------------------------------------------------------- to send


def frame_call(call: PackedCall) -> Framed:
    """A call as a part of a frame. Values are JSON already."""
    row = call.row
    numbers = [row.context]
    for each in call.generations:
        numbers += each.tokens, each.logprobs, each.versions
    parent = "null" if row.parent is None else encode_basestring_ascii(row.parent)
    generations = ",".join(
        f'{{"tokens":{len(each.tokens) // 4},"version_runs":{len(each.versions) // 16},'
        f'"stop":"{each.stop}","sampling":{each.sampling},"message":{each.message}}}'
        for each in call.generations
    )
    head = (
        f'{{"id":{encode_basestring_ascii(call.id)},'
        f'"attempt":{encode_basestring_ascii(call.attempt)},'
        f'"parent":{parent},'
        f'"root":{encode_basestring_ascii(row.root)},'
        f'"messages":{row.messages},'
        f'"context":{len(row.context) // 4},'
        f'"prompt_length":{row.prompt_length},'
        f'"prompt_digest":{encode_basestring_ascii(row.prompt_digest)},'
        f'"created":{json.dumps(row.created)},'
        f'"origin":{row.origin},'
        f'"generations":[{generations}]}}'
    )
    return Framed(head, b"".join(numbers))


def frame_calls(calls: Iterable[Framed]) -> bytes:
    """Some calls as one body."""
    return _frame("calls", list(calls))


def frame_trajectories(trajectories: Iterable[PackedTrajectory]) -> bytes:
    """Some trajectories as one body."""
    return _frame("trajectories", [_frame_trajectory(each) for each in trajectories])


def _frame_trajectory(trajectory: PackedTrajectory) -> Framed:
    calls = [frame_call(call) for call in trajectory.calls]
    head = (
        f'{{"attempt":{{"id":{encode_basestring_ascii(trajectory.attempt)},'
        f'"number":{trajectory.number},'
        f'"rollout":{trajectory.rollout},'
        f'"resources":{trajectory.resources or "{}"}}},'
        f'"reward":{json.dumps(trajectory.reward)},'
        f'"rewards":{to_json(cast(JsonValue, trajectory.rewards))},'
        f'"calls":[{",".join(call.head for call in calls)}]}}'
    )
    return Framed(head, b"".join(call.numbers for call in calls))


def _frame(name: str, parts: Sequence[Framed]) -> bytes:
    head = f'{{"{name}":[{",".join(part.head for part in parts)}]}}'.encode()
    return b"".join((LENGTH.pack(len(head)), head, *(part.numbers for part in parts)))


# --------------------------------------------------------------------------- to store


def read_packed_calls(body: bytes) -> list[PackedCall]:
    """The calls of a body that anybody may have sent.

    Raises:
        Malformed: it is no frame, or the head counts wrongly.
        ValidationError: of pydantic, if the head is not what it should be.
    """
    head, numbers = _split(body)
    calls = [_packed_call(each, numbers) for each in CallsHead.model_validate(head).calls]
    numbers.must_be_over()
    return calls


def _packed_call(head: CallHead, numbers: "_Numbers") -> PackedCall:
    row = CallRow(
        head.parent,
        head.root,
        checked_to_json(head.messages),
        numbers.take(4 * head.context),
        head.prompt_length,
        head.prompt_digest,
        head.created,
        checked_to_json(head.origin),
    )
    generations = [_packed_generation(each, numbers) for each in head.generations]
    return PackedCall(head.attempt, head.id, row, generations)


def _packed_generation(head: GenerationHead, numbers: "_Numbers") -> GenerationRow:
    tokens, logprobs = numbers.take(4 * head.tokens), numbers.take(8 * head.tokens)
    versions = numbers.take(16 * head.version_runs)
    lengths = [length for _, length in struct.iter_unpack("<qq", versions)]
    if sum(lengths) != head.tokens or any(length < 1 for length in lengths):
        raise Malformed(f"there are versions of {sum(lengths)} tokens, and {head.tokens} tokens")
    return GenerationRow(
        head.stop,
        checked_to_json(head.sampling),
        checked_to_json(head.message),
        versions,
        tokens,
        logprobs,
    )


# --------------------------------------------------------------------------- to use


def read_calls(body: bytes) -> list[Call]:
    """The calls that a server sent; they are not checked again."""
    head, numbers = _split(body)
    return [_call(each, numbers) for each in _listed(head, "calls")]


def read_trajectories(body: bytes) -> list[Trajectory]:
    """The trajectories that a server sent; they are not checked again."""
    head, numbers = _split(body)
    return [
        Trajectory.unchecked(
            attempt=Attempt.model_validate(each["attempt"]),
            calls=tuple(_call(call, numbers) for call in each["calls"]),
            rewards=tuple(Reward.model_validate(reward) for reward in each["rewards"]),
            reward=each["reward"],
        )
        for each in _listed(head, "trajectories")
    ]


def _listed(head: JsonValue, name: str) -> list[dict[str, Any]]:  # Any: of our own making
    if not isinstance(head, dict) or not isinstance(listed := head.get(name), list):
        raise Malformed(f"the head has no {name}")
    return cast(list[dict[str, Any]], listed)


def _call(head: dict[str, Any], numbers: "_Numbers") -> Call:
    return Call.unchecked(
        id=CallId(head["id"]),
        attempt=AttemptId(head["attempt"]),
        parent=head["parent"],
        root=head["root"],
        messages=tuple(head["messages"]),
        context=unpack_tokens(numbers.take(4 * head["context"])),
        prompt_length=head["prompt_length"],
        prompt_digest=head["prompt_digest"],
        generations=tuple(_generation(each, numbers) for each in head["generations"]),
        created=head["created"],
        origin=Origin.model_validate(head["origin"]),
    )


def _generation(head: dict[str, Any], numbers: "_Numbers") -> Generation:
    return Generation.unchecked(
        tokens=unpack_tokens(numbers.take(4 * head["tokens"])),
        logprobs=unpack_floats(numbers.take(8 * head["tokens"])),
        versions=unpack_runs(numbers.take(16 * head["version_runs"])),
        stop=head["stop"],
        sampling=Sampling.model_validate(head["sampling"]),
        message=head["message"],
    )


# --------------------------------------------------------------------------- frames


class _Numbers:
    """What follows a head, read from front to back."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._at = 0

    def take(self, length: int) -> bytes:
        end = self._at + length
        if end > len(self._body):
            raise Malformed(f"the head counts more numbers than the {len(self._body)} bytes hold")
        taken, self._at = self._body[self._at : end], end
        return bytes(taken)

    def must_be_over(self) -> None:
        if self._at != len(self._body):
            raise Malformed(f"{len(self._body) - self._at} bytes follow what the head counts")


def _split(body: bytes) -> tuple[JsonValue, _Numbers]:
    if len(body) < LENGTH.size:
        raise Malformed("a frame begins with the four bytes of its head's length")
    (length,) = LENGTH.unpack_from(body)
    if LENGTH.size + length > len(body):
        raise Malformed(f"the head has {length} bytes by its length, and fewer in the body")
    head = parse_json(body[LENGTH.size : LENGTH.size + length])
    return head, _Numbers(memoryview(body)[LENGTH.size + length :])
