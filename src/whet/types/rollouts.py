"""Rollouts, attempts, outcomes, rewards, and the records that the store lists of them."""

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

JUDGE = "judge"
"""First part of the keys of rewards that log a judge's verdicts and cost."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def _check_url_safe(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            f"invalid name {name!r}: expected 1 to 128 letters, digits, '.', '_' or '-',"
            " the first a letter or digit"
        )
    return name


Name = Annotated[
    str,
    AfterValidator(_check_url_safe),
    WithJsonSchema({"type": "string", "pattern": f"^{_NAME.pattern}$"}),
]
"""Name of a run or a resource, or id of a rollout: part of URL paths, hence only characters that
need no quoting."""


class Value(BaseModel):
    """A stored value: immutable, and an unknown field is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",  # a log-probability may be -inf
    )

    @classmethod
    def unchecked(cls, **fields: object) -> Self:
        """Build a value without validation; every field must be given and valid.

        For values we made ourselves or validated before: ten times as fast as validating, five
        times as fast as `model_construct`, whose result it equals.
        """
        value = cls.__new__(cls)
        _set(value, "__dict__", fields)
        _set(value, "__pydantic_fields_set__", _list_field_names(cls))
        _set(value, "__pydantic_extra__", None)
        _set(value, "__pydantic_private__", None)
        return value


_set = object.__setattr__


@cache
def _list_field_names(kind: type[Value]) -> set[str]:
    return set(kind.model_fields)


class Mode(StrEnum):
    """Purpose of a rollout. Only `TRAIN` rollouts are trained on."""

    TRAIN = "train"
    VAL = "val"
    TEST = "test"


class Status(StrEnum):
    """Status of a rollout or an attempt."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


TRANSITIONS: Mapping[Status, frozenset[Status]] = {
    Status.QUEUED: frozenset({Status.RUNNING, Status.FAILED}),
    Status.RUNNING: frozenset({Status.QUEUED, Status.SUCCEEDED, Status.FAILED}),
    Status.SUCCEEDED: frozenset(),
    Status.FAILED: frozenset(),
}
"""Every legal status change of a rollout. `RUNNING -> QUEUED` is a retry, `QUEUED -> FAILED` a
cancellation."""

TERMINAL = frozenset(status for status, targets in TRANSITIONS.items() if not targets)


class FailureKind(StrEnum):
    """Reason of a failed attempt: one vocabulary for runner, store and reports."""

    AGENT = "agent"
    """The agent raised."""
    CONTEXT_LENGTH = "context_length"
    """The agent raised, since its prompt was longer than the model's context."""
    TIMEOUT = "timeout"
    """The attempt exceeded its time limit."""
    BAD_REWARD = "bad_reward"
    """The agent returned no finite number."""
    WORKER_LOST = "worker_lost"
    """The lease expired: the worker died or lost its connection."""
    WORKER_LEFT = "worker_left"
    """The worker was stopped and returned the rollout to the queue."""
    MODEL_LOST = "model_lost"
    """The agent failed while its gateway was down or had restarted."""
    CANCELED = "canceled"
    """The rollout was canceled by its producer."""


RETRYABLE = (
    FailureKind.AGENT,
    FailureKind.CONTEXT_LENGTH,
    FailureKind.WORKER_LOST,
    FailureKind.WORKER_LEFT,
    FailureKind.MODEL_LOST,
)
"""Default failures after which a rollout is retried."""

NO_FAULT = frozenset({FailureKind.WORKER_LEFT, FailureKind.MODEL_LOST})
"""Failures that do not count towards `max_attempts` when the rollout is retried. `WORKER_LOST` is
not among them: the rollout may be what kills its workers."""


class SamplingOverride(Value):
    """Sampling parameters that a rollout forces on its calls, over those of the agent's request."""

    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None


class Rollout(Value):
    """A task to run. The caller chooses the id, so enqueueing twice is harmless."""

    id: Name
    task: JsonValue
    group: str
    """Rollouts of one group are compared with each other."""
    mode: Mode = Mode.TRAIN
    sampling: SamplingOverride = SamplingOverride()
    timeout_s: Annotated[float, Field(gt=0)] = 300.0
    max_attempts: Annotated[int, Field(ge=1, lt=2**31)] = 2
    retried: tuple[FailureKind, ...] = RETRYABLE
    """Failures after which it is retried, up to `max_attempts`."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    """Higher is claimed first; first in, first out among equals."""
    resources: dict[Name, Annotated[int, Field(ge=1)] | Literal["latest"]] = {}
    """Resources of its attempts, by name and version; `latest` is resolved when it is claimed."""


class Attempt(Value):
    """One execution of a rollout, owned by one worker while its lease lasts."""

    id: AttemptId
    rollout: Rollout
    number: int
    """1 for the first."""
    resources: dict[str, int] = {}
    """Resource versions resolved for it."""


class Failure(Value):
    """Reason of a failed attempt."""

    kind: FailureKind
    message: str
    """In one line, with file and line of the agent if it raised."""
    traceback: str = ""
    """Traceback of the agent's exception; kept with the attempt, not with its rollout."""


class Outcome(Value):
    """Result of an attempt: a reward or a failure."""

    reward: FiniteFloat | None = None
    failure: Failure | None = None

    @model_validator(mode="after")
    def _check_one_of_both(self) -> Self:
        if (self.reward is None) == (self.failure is None):
            raise ValueError("an outcome has either a reward or a failure")
        return self

    @property
    def status(self) -> Status:
        return Status.FAILED if self.failure else Status.SUCCEEDED


class Target(Value):
    """Generations that a reward is for, if not the whole attempt: those matching every field."""

    call: CallId | None = None
    """Generations of this call."""
    turn: Annotated[int, Field(ge=0)] | None = None
    """Generations at this depth of their conversation; 0 is the first turn."""
    agent: str | None = None
    """Generations of this agent."""

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if self.call is None and self.turn is None and self.agent is None:
            raise ValueError("a target names a call, a turn or an agent")
        return self

    def __str__(self) -> str:
        named = {"call": self.call, "turn": self.turn, "agent": self.agent}
        return ", ".join(f"{kind} {name!r}" for kind, name in named.items() if name is not None)


class Reward(Value):
    """A number emitted by an agent or returned as its result."""

    value: FiniteFloat
    key: str = "reward"
    target: Target | None = None
    """None is the whole attempt."""

    @property
    def is_own(self) -> bool:
        """Whether it is the attempt's own reward, not one beside it; the last of these counts."""
        return self.key == "reward" and self.target is None

    @property
    def is_of_judge(self) -> bool:
        """Whether it only logs a judge's verdict or its cost: never trained."""
        return self.key.startswith(f"{JUDGE}.")


class Resource(Value):
    """A named JSON value; a version never changes."""

    name: Name
    version: int
    """1 for the first."""
    value: JsonValue
    created: float


class RolloutRecord(Value):
    """A rollout with its status."""

    rollout: Rollout
    status: Status
    attempts: int
    """Attempts started so far."""
    created: float
    reward: FiniteFloat | None
    """Set if it succeeded."""
    failure: Failure | None
    """Set if it failed."""


class AttemptRecord(Value):
    """An attempt with its status, running or ended."""

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
    """Outcomes reported after the attempt had ended: kept, never trained."""


class WorkerRecord(Value):
    """A process that claims rollouts."""

    name: str
    started: float
    """Time of its first request."""
    seen: float
    """Time of its last request."""
    due: float
    """Time by which the next heartbeat is due; after it the worker counts as dead."""
    running: tuple[AttemptId, ...]


class RunSize(Value):
    """Number of records and bytes that a run occupies in its store."""

    rollouts: int
    attempts: int
    calls: int
    spans: int
    bytes: int
    """Tokens, log-probabilities, messages, spans and tasks; indexes not included."""


class Endpoint(Value):
    """Connection settings of an agent's model: base URL, API key and model name."""

    base_url: str
    api_key: str
    model: str
    reward_key: str = ""
    """Key to post rewards of the attempt with; the API key cannot, since a model's tools may see
    it."""
    policies: tuple[str, ...] = ()
    """Names of the run's policies, each a model of this endpoint, where there are several; `model`
    is the first of them."""
