"""Work to do, and how it went."""

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import Annotated, Literal, NewType, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    JsonValue,
    WithJsonSchema,
    model_validator,
)

AttemptId = NewType("AttemptId", str)
CallId = NewType("CallId", str)
GenerationId = NewType("GenerationId", str)
"""`<call id>.<choice index>`."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def _url_safe(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            f"{name!r} is no name: expected 1 to 128 letters, digits, '.', '_' or '-',"
            " the first a letter or digit"
        )
    return name


_AS_SCHEMA = WithJsonSchema({"type": "string", "pattern": f"^{_NAME.pattern}$"})

RolloutId = Annotated[str, AfterValidator(_url_safe), _AS_SCHEMA]
"""Travels in URL paths, so it is made of characters that need no quoting."""

Name = Annotated[str, AfterValidator(_url_safe), _AS_SCHEMA]
"""Of a run or a resource; as careful as a rollout's id."""


class Value(BaseModel):
    """A stored value: immutable, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @classmethod
    def unchecked(cls, **fields: object) -> Self:
        """A value of which every field is given and known to be right, in a tenth of the time.

        For what we made ourselves or checked before. `model_construct` takes five times as long;
        this sets what it would set.
        """
        value = cls.__new__(cls)
        _set(value, "__dict__", fields)
        _set(value, "__pydantic_fields_set__", _field_names(cls))
        _set(value, "__pydantic_extra__", None)
        _set(value, "__pydantic_private__", None)
        return value


_set = object.__setattr__


@cache
def _field_names(kind: type[Value]) -> set[str]:
    return set(kind.model_fields)


class Mode(StrEnum):
    """What a rollout is for. Only `TRAIN` is ever learned from."""

    TRAIN = "train"
    VAL = "val"
    TEST = "test"


class Status(StrEnum):
    """Where a rollout, or an attempt, stands."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


MOVES: Mapping[Status, frozenset[Status]] = {
    Status.QUEUED: frozenset({Status.RUNNING, Status.FAILED}),
    Status.RUNNING: frozenset({Status.QUEUED, Status.SUCCEEDED, Status.FAILED}),
    Status.SUCCEEDED: frozenset(),
    Status.FAILED: frozenset(),
}
"""Every legal change of a rollout. `RUNNING -> QUEUED` is an attempt that will be tried again,
`QUEUED -> FAILED` a rollout that was cancelled."""

TERMINAL = frozenset(status for status, moves in MOVES.items() if not moves)


class FailureKind(StrEnum):
    """Why an attempt failed: one vocabulary for runner, store and reports."""

    AGENT = "agent"
    """The agent raised."""
    TIMEOUT = "timeout"
    """The attempt outlived its limit."""
    REWARD = "reward"
    """The agent gave no usable reward."""
    WORKER_LOST = "worker_lost"
    """The lease ran out: the worker died or lost touch."""
    WORKER_LEFT = "worker_left"
    """The worker was told to stop, and handed the rollout back."""
    MODEL_LOST = "model_lost"
    """The agent failed while its gateway was gone, or had been started anew."""
    CANCELLED = "cancelled"
    """Whoever ordered the rollout no longer wants it."""


RETRIED = (
    FailureKind.AGENT,
    FailureKind.WORKER_LOST,
    FailureKind.WORKER_LEFT,
    FailureKind.MODEL_LOST,
)
"""Failures that a new attempt may mend, unless a rollout says otherwise."""

BLAMELESS = frozenset({FailureKind.WORKER_LEFT, FailureKind.MODEL_LOST})
"""Failures that say nothing of the rollout: where it is tried again, the try does not count. A
worker that died is none of them: the rollout may be what kills it."""


class SamplingOverride(Value):
    """What a rollout forces on its calls, whatever the agent asked for."""

    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None


class Rollout(Value):
    """A task to run. The id is the caller's, so enqueueing twice is harmless."""

    id: RolloutId
    task: JsonValue
    group: str
    """Rollouts of one group are compared with each other."""
    mode: Mode = Mode.TRAIN
    sampling: SamplingOverride = SamplingOverride()
    timeout_s: Annotated[float, Field(gt=0)] = 300.0
    max_attempts: Annotated[int, Field(ge=1, lt=2**31)] = 2
    retried: tuple[FailureKind, ...] = RETRIED
    """Failures after which it is tried again, until its `max_attempts` are used."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    """Higher is claimed first; equals in the order they came."""
    resources: dict[Name, Annotated[int, Field(ge=1)] | Literal["latest"]] = {}
    """What its attempts are given, by name and version; the latest is that of the claim."""


class Attempt(Value):
    """One execution of a rollout, owned by one worker until its lease ends."""

    id: AttemptId
    rollout: Rollout
    number: int
    """1 for the first."""
    resources: dict[str, int] = {}
    """The versions it was given."""


class Failure(Value):
    """Why an attempt failed, in one line."""

    kind: FailureKind
    message: str


class Outcome(Value):
    """How an attempt ended: with a reward, or with a failure."""

    reward: FiniteFloat | None = None
    failure: Failure | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.reward is None) == (self.failure is None):
            raise ValueError("an outcome has either a reward or a failure")
        return self

    @property
    def status(self) -> Status:
        return Status.FAILED if self.failure else Status.SUCCEEDED


class Target(Value):
    """What a reward is for, if not for the whole attempt: the answers all of this is true of."""

    call: CallId | None = None
    """Those of this call."""
    turn: Annotated[int, Field(ge=0)] | None = None
    """Those with so many answers before them in their conversation."""
    agent: str | None = None
    """Those of this agent."""

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if self.call is None and self.turn is None and self.agent is None:
            raise ValueError("a target names a call, a turn or an agent")
        return self

    def __str__(self) -> str:
        named = {"call": self.call, "turn": self.turn, "agent": self.agent}
        return ", ".join(f"{kind} {name!r}" for kind, name in named.items() if name is not None)


class Reward(Value):
    """A number an agent gave while it ran."""

    value: FiniteFloat
    key: str = "reward"
    target: Target | None = None
    """None is the whole attempt."""


class Resource(Value):
    """A named value of one version; both stand for ever."""

    name: Name
    version: int
    """1 for the first."""
    value: JsonValue
    created: float


class RolloutRecord(Value):
    """A rollout and how far it has come."""

    rollout: Rollout
    status: Status
    attempts: int
    """Begun so far."""
    created: float
    reward: FiniteFloat | None
    """Of a succeeded one."""
    failure: Failure | None
    """Of a failed one."""


class AttemptRecord(Value):
    """What is known of an attempt, running or ended."""

    id: AttemptId
    number: int
    worker: str
    status: Status
    started: float
    ended: float | None
    reward: FiniteFloat | None
    failure: Failure | None
    resources: dict[str, int]
    late: tuple[Outcome, ...]
    """Reports that came after the end: kept, never trained."""


class WorkerRecord(Value):
    """Someone who claims rollouts."""

    name: str
    started: float
    """When it was first heard of."""
    seen: float
    """When it was last heard of."""
    due: float
    """It is heard of again by then, or it is dead."""
    running: tuple[AttemptId, ...]


class RunSize(Value):
    """What a run keeps in its store."""

    rollouts: int
    attempts: int
    calls: int
    spans: int
    bytes: int
    """Of tokens, log-probabilities, messages, spans and tasks, without indexes."""


class Endpoint(Value):
    """What an agent needs to reach its model: the two settings every SDK has, and the name."""

    base_url: str
    api_key: str
    model: str
