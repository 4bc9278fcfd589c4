"""A model request on its way through the pipeline: canonical, rendered, completed."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from pydantic import JsonValue

from whet.gateway.messages import Message
from whet.gateway.templates.constraint import Constraint
from whet.types import Attempt, AttemptId, Call, CallId, GenerationId, Origin, Sampling


class ModelRequest(NamedTuple):
    """A model request in canonical form: messages, or a raw prompt."""

    messages: tuple[Message, ...] = ()
    raw: str | tuple[int, ...] | None = None
    """Prompt as text or token ids, for formats that use no chat template."""
    tools: tuple[JsonValue, ...] = ()
    sampling: Sampling = Sampling()
    n: int = 1
    stream: bool = False
    parse_calls: bool = False
    """Whether to parse tool calls in the output."""
    parallel_calls: bool = True
    """Whether a turn may have several tool calls; otherwise only the first is shown."""
    constraint: Constraint | None = None
    """Constraint on the output, if any."""
    shown: Mapping[str, JsonValue] = MappingProxyType({})
    """Fields that the wire format needs to show the stored call again."""


class RequestSource(NamedTuple):
    """The attempt, agent and model of a request."""

    attempt: Attempt | None
    """None for an unattributed call: served, never recorded."""
    dialect: str
    model: str
    agent: str
    digest: str
    """Digest of the request, which equal ones share."""
    is_retry: bool
    """Whether the client marks it as a retry."""
    size: int
    """Size of the body in bytes."""


class PreparedCall(NamedTuple):
    """A call that is ready to be sampled: its prompt, and the turn of the graph it continues."""

    id: CallId
    attempt: AttemptId | None
    request: ModelRequest
    sampling: Sampling
    """Of the first choice."""
    tokens: tuple[int, ...]
    """The whole prompt."""
    root: str
    parent: GenerationId | None
    messages: tuple[Message, ...]
    """Messages after the parent's."""
    prompt_suffix: tuple[int, ...]
    """Prompt tokens after the parent's."""
    origin: Origin
    created: float
    text: str = ""
    """The whole prompt as its template writes it."""
    recorded: Call | None = None
    """The call to replay, if this is a retry of a request that was recorded before."""


class CompletedCall(NamedTuple):
    """A recorded call, with what replies need besides."""

    call: Call
    messages: Sequence[Message]
    """Message of each choice."""
    tops: Sequence[Sequence[tuple[tuple[int, float], ...]]]
    """Top log-probabilities of each choice by token, if requested."""
