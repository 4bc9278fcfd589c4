"""Calls as bodies: a JSON head, then all numbers as the store packs them.

A frame is the length of the head in four bytes, the head, and the numbers that it counts, so a
token costs its bytes and no parsing.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pydantic import JsonValue

from whet.store.http.problems import Malformed
from whet.store.http.wire import CallHead, CallsHead, GenerationHead, TrajectoriesHead, parse_json
from whet.store.packing import (
    pack_floats,
    pack_ints,
    pack_runs,
    to_json,
    unpack_floats,
    unpack_ints,
    unpack_runs,
)
from whet.types import Call, Generation, Trajectory

FRAMED = "application/vnd.whet.calls"
LENGTH = struct.Struct("<I")


class Framed(NamedTuple):
    """A head, or a part of one, and the numbers it counts."""

    head: str
    numbers: bytes


def pack_call(call: Call) -> Framed:
    """A call as a part of a head, with its numbers."""
    numbers = [pack_ints(call.context)]
    generations: list[JsonValue] = []
    for generation in call.generations:
        versions = pack_runs(generation.versions)
        numbers += pack_ints(generation.tokens), pack_floats(generation.logprobs), versions
        generations.append(
            {
                "tokens": len(generation.tokens),
                "version_runs": len(versions) // 16,
                "stop": generation.stop,
                "sampling": generation.sampling.model_dump(),
                "message": generation.message,
            }
        )
    head: dict[str, JsonValue] = {
        "id": call.id,
        "attempt": call.attempt,
        "parent": call.parent,
        "root": call.root,
        "messages": list(call.messages),
        "context": len(call.context),
        "prompt_length": call.prompt_length,
        "prompt_digest": call.prompt_digest,
        "created": call.created,
        "origin": call.origin.model_dump(),
        "generations": generations,
    }
    return Framed(to_json(head), b"".join(numbers))


def frame_calls(calls: Iterable[Framed]) -> bytes:
    """Some calls as one body."""
    return _frame("calls", list(calls))


def frame_trajectories(trajectories: Iterable[Trajectory]) -> bytes:
    """Some trajectories as one body."""
    framed: list[Framed] = []
    for trajectory in trajectories:
        calls = [pack_call(call) for call in trajectory.calls]
        small = to_json(
            {
                "attempt": trajectory.attempt.model_dump(),
                "rewards": [reward.model_dump() for reward in trajectory.rewards],
                "reward": trajectory.reward,
            }
        )
        head = f'{{"calls":[{",".join(call.head for call in calls)}],{small[1:]}'
        framed.append(Framed(head, b"".join(call.numbers for call in calls)))
    return _frame("trajectories", framed)


def read_calls(body: bytes) -> list[Call]:
    """The calls of a body. Raises Malformed, or pydantic's ValidationError."""
    head, numbers = _split(body)
    calls = [_call(each, numbers) for each in CallsHead.model_validate(head).calls]
    numbers.must_be_over()
    return calls


def read_trajectories(body: bytes) -> list[Trajectory]:
    """The trajectories of a body. Raises Malformed, or pydantic's ValidationError."""
    head, numbers = _split(body)
    trajectories = [
        Trajectory.model_construct(
            attempt=each.attempt,
            calls=tuple(_call(call, numbers) for call in each.calls),
            rewards=each.rewards,
            reward=each.reward,
        )
        for each in TrajectoriesHead.model_validate(head).trajectories
    ]
    numbers.must_be_over()
    return trajectories


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


def _frame(name: str, parts: Sequence[Framed]) -> bytes:
    head = f'{{"{name}":[{",".join(part.head for part in parts)}]}}'.encode()
    return b"".join((LENGTH.pack(len(head)), head, *(part.numbers for part in parts)))


def _split(body: bytes) -> tuple[JsonValue, _Numbers]:
    if len(body) < LENGTH.size:
        raise Malformed("a frame begins with the four bytes of its head's length")
    (length,) = LENGTH.unpack_from(body)
    if LENGTH.size + length > len(body):
        raise Malformed(f"the head has {length} bytes by its length, and fewer in the body")
    head = parse_json(body[LENGTH.size : LENGTH.size + length])
    return head, _Numbers(memoryview(body)[LENGTH.size + length :])


def _call(head: CallHead, numbers: _Numbers) -> Call:
    return Call.model_construct(
        id=head.id,
        attempt=head.attempt,
        parent=head.parent,
        root=head.root,
        messages=head.messages,
        context=unpack_ints(numbers.take(4 * head.context)),
        prompt_length=head.prompt_length,
        prompt_digest=head.prompt_digest,
        generations=tuple(_generation(each, numbers) for each in head.generations),
        created=head.created,
        origin=head.origin,
    )


def _generation(head: GenerationHead, numbers: _Numbers) -> Generation:
    tokens = unpack_ints(numbers.take(4 * head.tokens))
    logprobs = unpack_floats(numbers.take(8 * head.tokens))
    runs = numbers.take(16 * head.version_runs)
    lengths = [length for _, length in struct.iter_unpack("<qq", runs)]
    if sum(lengths) != len(tokens) or any(length < 1 for length in lengths):
        raise Malformed(f"versions of {sum(lengths)} tokens for {len(tokens)}")
    return Generation.model_construct(
        tokens=tokens,
        logprobs=logprobs,
        versions=unpack_runs(runs),
        stop=head.stop,
        sampling=head.sampling,
        message=head.message,
    )
