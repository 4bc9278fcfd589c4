"""The nouns: one word, one meaning. Everything that is stored or crosses a part is defined here.

    task          what the user's dataset holds; any JSON
    rollout       a task to run, in a group, with a mode and limits
    attempt       one execution of a rollout, under a lease
    call          one model request of an attempt
    generation    the exact tokens a call sampled, with log-probabilities and policy versions
    reward        a number an agent gave, with a key
    trajectory    an attempt read back for learning
    row           one token sequence with its sampled spans and their credit: all a trainer sees
    policy        a set of weights with a version
    resource      a named JSON value with a version, given to agents
    run           a name in a store; what belongs to one is not seen by another

Values are frozen, refuse unknown fields, and check themselves.
"""

import hashlib
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal, NewType, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    JsonValue,
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


RolloutId = Annotated[str, AfterValidator(_url_safe)]
"""Travels in URL paths, so it is made of characters that need no quoting."""

Name = Annotated[str, AfterValidator(_url_safe)]
"""Of a run or a resource; as careful as a rollout's id."""


class Value(BaseModel):
    """A stored value: immutable, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


# --------------------------------------------------------------------------- work to do


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


class Reward(Value):
    """A number an agent gave while it ran."""

    value: FiniteFloat
    key: str = "reward"


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
    bytes: int
    """Of tokens, log-probabilities, messages and tasks, without indexes."""


class Endpoint(Value):
    """What an agent needs to reach its model: the two settings every SDK has, and the name."""

    base_url: str
    api_key: str
    model: str


# --------------------------------------------------------------------------- what was sampled


class Sampling(Value):
    """How to sample one continuation."""

    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 is off."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """`None` samples until the model stops or its context is full."""
    stop: tuple[str, ...] = ()
    """Sampling ends once the text contains one of these; the tokens keep it."""
    stop_ids: tuple[int, ...] = ()
    """Sampling ends with one of these ids, which is kept as the last token."""
    seed: int | None = None
    """There is no default seed: equal requests give different samples."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    grammar: str | None = None
    """What the text must follow: Lark text in llguidance's dialect, where `%json {...}` is a JSON
    schema. A stop id may come exactly where the text is complete. Log-probabilities are then those
    of the masked distribution, which no trainer can reproduce: constrained generations are context.
    An engine that cannot constrain refuses."""


StopReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tokens as they leave the engine. The last piece of a generation has a stop reason."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of `tokens`, under the distribution they were sampled from."""
    versions: tuple[int, ...]
    """Of the weights that sampled each of them."""
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each token the likeliest ids with their log-probabilities, if asked for."""
    stop: StopReason | None = None


class Generation(Value):
    """What one choice of a call sampled: exact tokens, never text encoded again."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of `tokens`, under the distribution they were sampled from."""
    versions: tuple[int, ...]
    """Of the weights that sampled each token."""
    stop: StopReason
    sampling: Sampling
    message: dict[str, JsonValue]
    """The assistant message the agent was given, in canonical form."""

    @model_validator(mode="after")
    def _one_of_each_per_token(self) -> Self:
        if not len(self.tokens) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"{len(self.tokens)} tokens but {len(self.logprobs)} logprobs "
                f"and {len(self.versions)} versions"
            )
        return self


class Fork(StrEnum):
    """Why a call does not simply continue the newest turn of its attempt's conversation."""

    NEW_CONVERSATION = "new_conversation"
    """It begins differently: a sub-agent, a side call."""
    RESAMPLED = "resampled"
    """The same prompt once more."""
    BRANCH = "branch"
    """A turn that was continued before is continued in another way."""
    OTHER_TOOLS = "other_tools"
    """The same messages under other tools or another model name: another prompt from the start."""
    EDITED_HISTORY = "edited_history"
    """An earlier turn came back changed, left out or summed up."""
    THINKING_DROPPED = "thinking_dropped"
    """The template leaves out earlier thinking from here on."""
    TEMPLATE = "template"
    """The template cannot continue this turn: the call is rendered whole."""


class Origin(Value):
    """Where a call came from, and how its prompt came about."""

    dialect: str = "chat"
    """The wire format it came in."""
    model: str = ""
    """The name the agent asked for."""
    agent: str = ""
    """Which of several agents in the attempt asked, if it said so."""
    tools: tuple[str, ...] = ()
    """Names of the tools it was offered."""
    request: str = ""
    """Digest of the request: a retry of it is answered from this call."""
    fork: Fork | None = None
    lossy: bool = False
    """An earlier turn came back without its text or thinking; its sampled tokens stand."""
    shown: dict[str, JsonValue] = {}
    """What the wire format needs to show the call again."""


class Call(Value):
    """One model request of an attempt.

    The prompt the engine saw is the parent generation's whole sequence followed by `context`;
    storing only the difference keeps a conversation of T turns at O(T).
    """

    id: CallId
    attempt: AttemptId
    parent: GenerationId | None
    """The generation this request continues, or None where the conversation begins."""
    root: str
    """Digest of what the whole conversation hangs on: policy, tools, template arguments."""
    messages: tuple[dict[str, JsonValue], ...]
    """The canonical messages after the parent's."""
    context: tuple[int, ...]
    """The tokens after the parent's: rendered, never sampled."""
    prompt_length: int
    prompt_digest: str
    """Of the ids the engine was given; rows are proven against it."""
    generations: tuple[Generation, ...]
    created: float
    """Seconds since the epoch."""
    origin: Origin = Origin()

    def generation_id(self, index: int) -> GenerationId:
        return GenerationId(f"{self.id}.{index}")


def digest_tokens(tokens: Sequence[int], after: hashlib.blake2b | None = None) -> hashlib.blake2b:
    """The running digest of `tokens` after those of `after`, which is left as it was."""
    digest = after.copy() if after else hashlib.blake2b(digest_size=16)
    digest.update(struct.pack(f"{len(tokens)}i", *tokens))
    return digest


# --------------------------------------------------------------------------- what is learned


class Trajectory(Value):
    """A succeeded attempt read back for learning: its calls in order, and its reward."""

    attempt: Attempt
    calls: tuple[Call, ...]
    rewards: tuple[Reward, ...]
    reward: FiniteFloat


Group = Sequence[Trajectory]
"""The trajectories of one group: the same task, tried several times."""


@dataclass(frozen=True, slots=True)
class Credit:
    """A trajectory and what each of its generations is worth."""

    trajectory: Trajectory
    advantages: Mapping[GenerationId, float]
    """A generation that is absent is context and is not trained."""


@dataclass(frozen=True, slots=True)
class SampledSpan:
    """The part of a row that one generation sampled."""

    generation: GenerationId
    start: int
    """Index of the first sampled token in the row."""
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    advantages: tuple[float, ...]
    """Per token."""
    weight: float
    """What one token of this span counts in the loss; the losses themselves are plain sums."""
    temperature: float
    top_p: float
    top_k: int

    @property
    def end(self) -> int:
        return self.start + len(self.logprobs)


@dataclass(frozen=True, slots=True)
class Row:
    """One token sequence, proven to be what the engine saw and sampled. All a trainer sees."""

    tokens: tuple[int, ...]
    spans: tuple[SampledSpan, ...]
    """In order, without overlap. Tokens outside them are context."""
    rollout: str
    group: str

    @property
    def trained_tokens(self) -> int:
        return sum(len(span.logprobs) for span in self.spans)


Metrics = Mapping[str, float]


class StepRecord(Value):
    """A training step that is done: written in one transaction with what it consumed."""

    step: int
    """0 for the first."""
    version: int
    """Of the policy after the step."""
    checkpoint: str
    """Folder name under the run's `checkpoints/`."""
    consumed: tuple[str, ...]
    """The rollouts this step learned from, or found nothing to learn in."""
    metrics: dict[str, float]
