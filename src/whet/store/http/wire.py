"""What goes over HTTP between a store's server and its clients.

Small things are JSON. Calls are framed: the length of a JSON head, the head, then all numbers as
the store packs them, which the head counts; a token costs its bytes and no parsing.
"""

import json
import struct
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

from pydantic import Field, FiniteFloat, JsonValue, StringConstraints

from whet.store.http.problems import Malformed, Problem
from whet.store.packing import (
    pack_floats,
    pack_ints,
    pack_runs,
    to_json,
    unpack_floats,
    unpack_ints,
    unpack_runs,
)
from whet.types import (
    Attempt,
    AttemptId,
    Call,
    CallId,
    Generation,
    GenerationId,
    Mode,
    Origin,
    Outcome,
    Reward,
    Rollout,
    Sampling,
    Status,
    StopReason,
    Trajectory,
    Value,
)

FRAMED = "application/vnd.whet.calls"
HEAD = struct.Struct("<I")

MAX_WAIT_S = 30.0
"""A request is held no longer than this; whoever still waits asks again."""

MAX_PAGE = 10_000
LONGEST_LEASE_S = 7 * 24 * 3600.0

Ticket = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
"""Made by the client for each request: asked again with the same one, it is not done again."""
Worker = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f]{1,256}$")]
Lease = Annotated[FiniteFloat, Field(gt=0, le=LONGEST_LEASE_S)]
Wait = Annotated[FiniteFloat, Field(ge=0, le=MAX_WAIT_S)]
Count = Annotated[int, Field(ge=0, lt=2**31)]


# --------------------------------------------------------------------------- errors


class Refusal(Value):
    """The body of every answer that is not a success."""

    error: Problem


class Done(Value):
    """What became of each item of a batch, in order: nothing to say, or why it was refused."""

    errors: tuple[Problem | None, ...]


# --------------------------------------------------------------------------- the queue


class Enqueue(Value):
    """Rollouts to add: all or none."""

    rollouts: tuple[Rollout, ...]


class Claim(Value):
    """Someone who wants a rollout."""

    ticket: Ticket
    worker: Worker
    lease_s: Lease


class Claims(Value):
    """Who wants rollouts; the answer comes once there is one, or after `wait_s`."""

    claims: Annotated[tuple[Claim, ...], Field(min_length=1, max_length=1000)]
    wait_s: Wait = 0.0


class Claimed(Value):
    """What became of a claim: an attempt, an error, or neither if there was nothing."""

    attempt: Attempt | None = None
    error: Problem | None = None


class ClaimedBatch(Value):
    """What became of each claim, in order."""

    claimed: tuple[Claimed, ...]


class Heartbeat(Value):
    """An attempt that is alive."""

    attempt: AttemptId
    lease_s: Lease


class Heartbeats(Value):
    """Attempts that are alive."""

    heartbeats: tuple[Heartbeat, ...]


class Finish(Value):
    """An attempt that ended."""

    attempt: AttemptId
    outcome: Outcome


class Finishes(Value):
    """Attempts that ended."""

    finishes: tuple[Finish, ...]


class RolloutIds(Value):
    """Some rollouts."""

    rollouts: tuple[str, ...]


class WaitFor(Value):
    """Rollouts whose end is waited for."""

    rollouts: tuple[str, ...]
    wait_s: Wait = MAX_WAIT_S


class Waited(Value):
    """Whether all have ended; if not, ask again."""

    ended: bool


class Cancel(Value):
    """Rollouts that are no longer wanted."""

    ticket: Ticket
    rollouts: tuple[str, ...]


class Ticketed(Value):
    """A request without anything but its ticket."""

    ticket: Ticket


class Counted(Value):
    """How many there were."""

    count: int


class HowLong(Value):
    """How long a request may be held."""

    wait_s: Wait = MAX_WAIT_S


class Standing(Value):
    """Where an attempt stands; `running` means: ask again."""

    status: Status


# --------------------------------------------------------------------------- the rest


class Emit(Value):
    """A reward of an attempt."""

    ticket: Ticket
    attempt: AttemptId
    reward: Reward


class Emits(Value):
    """Rewards of attempts."""

    rewards: tuple[Emit, ...]


class Publish(Value):
    """The next version of a resource."""

    ticket: Ticket
    value: JsonValue


class Published(Value):
    """Which version it became."""

    version: int


class Prune(Value):
    """Forget what ended before a time."""

    ticket: Ticket
    before: FiniteFloat


class StepPage(Value):
    """Which steps to read."""

    after: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    limit: Annotated[int, Field(ge=0, le=MAX_PAGE)] = MAX_PAGE


class RolloutPage(Value):
    """Which rollouts to list."""

    status: Status | None = None
    mode: Mode | None = None
    group: str | None = None
    after: str | None = None
    limit: Annotated[int, Field(ge=0, le=MAX_PAGE)] = 100


# --------------------------------------------------------------------------- calls


class GenerationHead(Value):
    """A generation, with how many numbers of it follow the head."""

    tokens: Count
    version_runs: Count
    stop: StopReason
    sampling: Sampling
    message: dict[str, JsonValue]


class CallHead(Value):
    """A call, with how many numbers of it follow the head.

    These are, in order: `context` int32; then for each generation `tokens` int32, as many float64
    log-probabilities, and `version_runs` pairs of int64: a version and how many tokens it sampled.
    All are little-endian.
    """

    id: CallId
    attempt: AttemptId
    parent: GenerationId | None
    root: str
    messages: tuple[dict[str, JsonValue], ...]
    context: Count
    prompt_length: Count
    prompt_digest: str
    created: FiniteFloat
    origin: Origin
    generations: tuple[GenerationHead, ...]


class CallsHead(Value):
    """The head of some calls."""

    calls: tuple[CallHead, ...]


class TrajectoryHead(Value):
    """A trajectory, whose calls are heads."""

    attempt: Attempt
    calls: tuple[CallHead, ...]
    rewards: tuple[Reward, ...]
    reward: FiniteFloat


class TrajectoriesHead(Value):
    """The head of some trajectories."""

    trajectories: tuple[TrajectoryHead, ...]


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
    return b"".join((HEAD.pack(len(head)), head, *(part.numbers for part in parts)))


def _split(body: bytes) -> tuple[JsonValue, _Numbers]:
    if len(body) < HEAD.size:
        raise Malformed("a frame begins with the four bytes of its head's length")
    (length,) = HEAD.unpack_from(body)
    if HEAD.size + length > len(body):
        raise Malformed(f"the head has {length} bytes by its length, and fewer in the body")
    head = parse_json(body[HEAD.size : HEAD.size + length])
    return head, _Numbers(memoryview(body)[HEAD.size + length :])


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


# --------------------------------------------------------------------------- JSON


def parse_json(text: bytes) -> JsonValue:
    """JSON with what Python adds to it: infinities. Raises Malformed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the body is no JSON: {error}") from error
