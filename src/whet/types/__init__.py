"""The nouns: one word, one meaning. Everything that is stored or crosses a part is defined here.

    task          what the user's dataset holds; any JSON
    rollout       a task to run, in a group, with a mode and limits
    attempt       one execution of a rollout, under a lease
    call          one model request of an attempt
    generation    the exact tokens a call sampled, with log-probabilities and policy versions
    span          an OpenTelemetry record of what an agent or its framework did
    reward        a number an agent gave, with a key and a target
    trajectory    an attempt read back for learning
    row           one token sequence with its sampled spans and their credit: all a trainer sees
    policy        a set of weights with a version
    resource      a named JSON value with a version, given to agents
    run           a name in a store; what belongs to one is not seen by another

Values are frozen, refuse unknown fields, and check themselves.
"""

from whet.types.gateways import GATEWAY_PREFIX, GatewayAddress, gateways_in
from whet.types.given import AttemptedRollout, PromptTemplate
from whet.types.learned import (
    Credit,
    Group,
    Metrics,
    Row,
    SampledSpan,
    StepRecord,
    Trajectory,
)
from whet.types.sampled import (
    Call,
    Fork,
    Generation,
    Origin,
    Piece,
    Sampling,
    StopReason,
    digest_tokens,
    join_pieces,
    pack_tokens,
)
from whet.types.spans import Span, SpanEvent
from whet.types.work import (
    BLAMELESS,
    MOVES,
    RETRIED,
    TERMINAL,
    Attempt,
    AttemptId,
    AttemptRecord,
    CallId,
    Endpoint,
    Failure,
    FailureKind,
    GenerationId,
    Mode,
    Name,
    Outcome,
    Resource,
    Reward,
    Rollout,
    RolloutId,
    RolloutRecord,
    RunSize,
    SamplingOverride,
    Status,
    Target,
    Value,
    WorkerRecord,
)

__all__ = [
    "BLAMELESS",
    "GATEWAY_PREFIX",
    "MOVES",
    "RETRIED",
    "TERMINAL",
    "Attempt",
    "AttemptId",
    "AttemptRecord",
    "AttemptedRollout",
    "Call",
    "CallId",
    "Credit",
    "Endpoint",
    "Failure",
    "FailureKind",
    "Fork",
    "GatewayAddress",
    "Generation",
    "GenerationId",
    "Group",
    "Metrics",
    "Mode",
    "Name",
    "Origin",
    "Outcome",
    "Piece",
    "PromptTemplate",
    "Resource",
    "Reward",
    "Rollout",
    "RolloutId",
    "RolloutRecord",
    "Row",
    "RunSize",
    "SampledSpan",
    "Sampling",
    "SamplingOverride",
    "Span",
    "SpanEvent",
    "Status",
    "StepRecord",
    "StopReason",
    "Target",
    "Trajectory",
    "Value",
    "WorkerRecord",
    "digest_tokens",
    "gateways_in",
    "join_pieces",
    "pack_tokens",
]
