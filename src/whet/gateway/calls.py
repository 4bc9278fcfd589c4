"""A model request on its way: what is asked, by whom, the prompt of it, and what came back."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from pydantic import JsonValue

from whet.gateway.constraint import Constraint
from whet.gateway.messages import Message
from whet.types import Attempt, AttemptId, Call, CallId, GenerationId, Origin, Sampling


class Ask(NamedTuple):
    """A model request in canonical form: messages, or a raw prompt."""

    messages: tuple[Message, ...] = ()
    raw: str | tuple[int, ...] | None = None
    """The prompt itself, for formats that render nothing: text, or ids."""
    tools: tuple[JsonValue, ...] = ()
    sampling: Sampling = Sampling()
    n: int = 1
    stream: bool = False
    calls_tools: bool = False
    """Whether tool calls in the text are looked for."""
    several_calls: bool = True
    """Whether a turn may show more than one; only the first is shown otherwise."""
    constraint: Constraint | None = None
    """What the answer must be, if it is not free."""
    shown: Mapping[str, JsonValue] = MappingProxyType({})
    """What the wire format needs to show the call again."""


class Source(NamedTuple):
    """Who asks."""

    attempt: Attempt | None
    """None for a call that names no attempt: served, never recorded."""
    dialect: str
    model: str
    agent: str
    request: str
    """Digest of the request."""
    is_retry: bool
    """The client says it has sent this request before."""
    size: int = 0
    """Of the request, in bytes."""


class Prompt(NamedTuple):
    """What the engine will be given, and where it hangs in the attempt's graph."""

    call: CallId
    attempt: AttemptId | None
    ask: Ask
    sampling: Sampling
    tokens: tuple[int, ...]
    root: str
    parent: GenerationId | None
    messages: tuple[Message, ...]
    """After the parent's."""
    context: tuple[int, ...]
    """After the parent's."""
    origin: Origin
    created: float
    recorded: Call | None = None
    """The call that answered this very request before, if this is a retry of it."""


class Completed(NamedTuple):
    """A call that is recorded, and what is not read from it again."""

    call: Call
    messages: Sequence[Message]
    """What the choices say."""
    tops: Sequence[Sequence[tuple[tuple[int, float], ...]]]
    """The likeliest ids of each choice, if they were asked for."""
