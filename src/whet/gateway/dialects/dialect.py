"""Parts of a wire format. Each format is a `Dialect`; everything else is generic."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pydantic import JsonValue

from whet.errors import RequestError
from whet.gateway.graph import Graph
from whet.gateway.requests import CompletedCall, ModelRequest, PreparedCall
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.detokenize import Delta
from whet.types import TokenChunk

Json = dict[str, JsonValue]


class ThreadUnsupported(RequestError):
    """A thread kept by the server was requested; the client then sends its whole history."""


class WireError(NamedTuple):
    """An error as every wire format reports it: HTTP status, code and message."""

    status: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """Error bodies and events of a wire format."""

    body: Callable[[WireError], Json]
    event: Callable[[WireError], bytes]
    """Formats the last event of a stream that fails."""


class Reply(Protocol):
    """The reply to one request: one body, or the events of a stream (first, chunk..., last)."""

    def build_body(self, completed: CompletedCall) -> Json:
        """Build the body of a reply that is not streamed."""
        ...

    def build_first_events(self) -> bytes:
        """Build the events that open the stream."""
        ...

    def build_chunk_events(self, index: int, chunk: TokenChunk, delta: Delta) -> bytes:
        """Build the events for the next tokens of a choice; empty if there is nothing to send."""
        ...

    def build_last_events(self, completed: CompletedCall, rest: Sequence[Delta]) -> bytes:
        """Build the events that end the stream, once the call is recorded.

        `rest` is the text of each choice that was not sent yet.
        """
        ...


class ParsedRequest(Protocol):
    """A validated request of a wire format."""

    @property
    def model(self) -> str:
        """The requested model."""
        ...

    def to_model_request(self, graph: Graph) -> ModelRequest:
        """Convert to canonical form; turns that are only referenced are looked up in the graph.

        Raises:
            RequestError: names the field that cannot be honored.
            NotFound: a referenced turn is missing.
        """
        ...

    def build_reply(self, call: PreparedCall, template: ChatTemplate) -> Reply:
        """Build the reply, which formats what will be sampled."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """A wire format."""

    name: str
    path: str
    """Path behind `/v1`."""
    parse: Callable[[bytes], ParsedRequest]
    """Parses the body of a request. Raises RequestError that names the invalid field."""
    errors: ErrorFormat
