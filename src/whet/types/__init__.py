"""Value types: one word, one meaning. Every value that is stored or crosses parts is here.

    task          an item of the user's dataset; any JSON
    rollout       a task to run, in a group, with a mode and limits
    attempt       one execution of a rollout, under a lease
    call          one model request of an attempt
    generation    the exact tokens a call sampled, with log-probabilities and policy versions
    span          an OpenTelemetry record of an agent or its framework
    reward        a number emitted for an attempt, with a key and a target
    trajectory    an ended attempt with its calls and rewards, read back for training
    row           one token sequence with its sampled segments and their advantages: a trainer's
                  only input
    policy        a named set of weights with a version
    resource      a named JSON value with a version, passed to agents
    run           a namespace in a store, isolated from other runs

Values are frozen, reject unknown fields, and validate themselves.
"""

from whet.types.calls import (
    Call,
    Fork,
    Generation,
    Omission,
    Origin,
    Sampling,
    StopReason,
    TokenChunk,
    digest_tokens,
    join_chunks,
    pack_tokens,
)
from whet.types.resources import (
    GATEWAY_PREFIX,
    POLICY_PREFIX,
    RUNNERS_PREFIX,
    TRAINER,
    AttemptedRollout,
    GatewayAddress,
    PromptTemplate,
    find_gateways,
)
from whet.types.rollouts import (
    JUDGE,
    NO_FAULT,
    RETRYABLE,
    TERMINAL,
    TRANSITIONS,
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
    RolloutRecord,
    RunSize,
    SamplingOverride,
    Status,
    Target,
    Value,
    WorkerRecord,
)
from whet.types.spans import Span, SpanEvent
from whet.types.training import (
    JUDGE_MODEL,
    LENGTH_PENALTY,
    NO_ADVANTAGES,
    Credit,
    Group,
    Metrics,
    Row,
    SampledSegment,
    StepRecord,
    Trajectory,
)

__all__ = [
    "GATEWAY_PREFIX",
    "JUDGE",
    "JUDGE_MODEL",
    "LENGTH_PENALTY",
    "NO_ADVANTAGES",
    "NO_FAULT",
    "POLICY_PREFIX",
    "RETRYABLE",
    "RUNNERS_PREFIX",
    "TERMINAL",
    "TRAINER",
    "TRANSITIONS",
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
    "Omission",
    "Origin",
    "Outcome",
    "PromptTemplate",
    "Resource",
    "Reward",
    "Rollout",
    "RolloutRecord",
    "Row",
    "RunSize",
    "SampledSegment",
    "Sampling",
    "SamplingOverride",
    "Span",
    "SpanEvent",
    "Status",
    "StepRecord",
    "StopReason",
    "Target",
    "TokenChunk",
    "Trajectory",
    "Value",
    "WorkerRecord",
    "digest_tokens",
    "find_gateways",
    "join_chunks",
    "pack_tokens",
]
