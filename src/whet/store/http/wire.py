"""What goes over HTTP between a store's server and its clients, as JSON; calls are in `frames`."""

import json
from typing import Annotated

from pydantic import Field, FiniteFloat, JsonValue, StringConstraints

from whet.store.http.problems import Malformed, Problem
from whet.types import (
    Attempt,
    AttemptId,
    CallId,
    GenerationId,
    Mode,
    Origin,
    Outcome,
    Reward,
    Rollout,
    Sampling,
    Span,
    Status,
    StopReason,
    Value,
)

MAX_WAIT_S = 30.0
"""A request is held no longer than this; whoever still waits asks again."""

MAX_PAGE = 10_000
LONGEST_LEASE_S = 7 * 24 * 3600.0

Ticket = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
"""Made by the client for each request: asked again with the same one, it is not done again."""
Worker = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f]{1,256}$")]
Lease = Annotated[FiniteFloat, Field(gt=0, le=LONGEST_LEASE_S)]
Wait = Annotated[FiniteFloat, Field(ge=0, le=MAX_WAIT_S)]
Held = Annotated[FiniteFloat, Field(ge=0.1, le=MAX_WAIT_S)]
"""Long enough to look once."""
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
    wait_s: Held = MAX_WAIT_S


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

    wait_s: Held = MAX_WAIT_S


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


class Told(Value):
    """Spans of an attempt."""

    attempt: AttemptId
    spans: tuple[Span, ...]


class Spans(Value):
    """Spans of attempts."""

    told: tuple[Told, ...]


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


class Gateway(Value):
    """One that serves the run's model."""

    url: str
    """Agents ask below `/v1` of it, with an attempt's key."""
    model: str


# --------------------------------------------------------------------------- JSON


def parse_json(text: bytes) -> JsonValue:
    """JSON with what Python adds to it: infinities. Raises Malformed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the body is no JSON: {error}") from error
