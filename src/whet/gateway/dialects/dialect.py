"""The seam between the gateway and a wire format: one class a format, everything else generic."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, JsonValue, ValidationError

from whet.errors import RequestError
from whet.gateway import strictjson
from whet.gateway.calls import Ask, Prompt
from whet.gateway.graph import Graph
from whet.gateway.messages import Message
from whet.gateway.template import ChatTemplate
from whet.gateway.text import Delta
from whet.types import Call, Piece

Json = dict[str, JsonValue]
T = TypeVar("T", bound=BaseModel)

Said = Delta | Message
"""Text and reasoning: some of a message, or all of it."""


class ThreadUnsupported(RequestError):
    """A thread kept by the server was asked for; the client sends its whole history instead."""


BRANCHES = {"str", "int", "float", "bool"}


class Told(NamedTuple):
    """An error as every format tells it: an HTTP status, a code and a sentence."""

    status: int
    code: str
    message: str


class Reply(Protocol):
    """The answer to one request. A streamed one is first, piece..., last; else it is whole."""

    shows_tokens: bool
    """Whether the events of a piece say more of it than its text."""

    def whole(
        self,
        call: Call,
        messages: Sequence[Message],
        tops: Sequence[Sequence[tuple[tuple[int, float], ...]]],
    ) -> Json:
        """The reply to a request that does not stream.

        `messages` are what the choices say, `tops` the likeliest ids of each.
        """
        ...

    def first(self) -> bytes:
        """The events that open the stream."""
        ...

    def piece(self, index: int, piece: Piece, delta: Delta) -> bytes:
        """The events for some tokens of a choice; empty if there is nothing to say yet."""
        ...

    def last(self, call: Call, messages: Sequence[Message], rest: Sequence[Said]) -> bytes:
        """The events that end the stream, which go out once the call is recorded.

        `rest` is what of `messages` is still to be said.
        """
        ...


class Asked(Protocol):
    """A request as a wire format understood it."""

    @property
    def model(self) -> str:
        """The name the agent asked for."""
        ...

    def ask(self, graph: Graph) -> Ask:
        """In canonical form; earlier turns a request only names are looked up in the graph.

        Raises:
            RequestError: names the field that cannot be honoured.
            NotFound: an earlier turn it names is not there.
        """
        ...

    def reply(self, prompt: Prompt, template: ChatTemplate) -> Reply:
        """The answer to be given."""
        ...


class Dialect(Protocol):
    """A wire format."""

    name: str
    path: str
    """Behind `/v1`."""

    def parse(self, body: bytes) -> Asked:
        """Understand a request. Raises RequestError that names the field at fault."""
        ...

    def error(self, told: Told) -> Json:
        """The body of an error reply."""
        ...

    def error_event(self, told: Told) -> bytes:
        """The event that tells of an error once a stream has begun."""
        ...


def validate(model: type[T], body: bytes) -> T:
    """A request from the wire, where null is as good as absent.

    Raises:
        RequestError: names the first field at fault.
    """
    try:
        value = strictjson.loads(body)
        if isinstance(value, dict):
            value = {name: part for name, part in value.items() if part is not None}
        return model.model_validate(value)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    # Where a union failed, the place names the branch; agents know no branches.
    where = ".".join(str(part) for part in fault["loc"] if not _is_branch(part))
    if fault["type"] == "extra_forbidden":
        raise RequestError(f"the field {where!r} is not supported")
    if fault["type"] in ("model_type", "dict_type"):
        raise RequestError(f"{where or 'the body'}: input should be an object")
    raise RequestError(f"{where}: {fault['msg'][:300].lower()}")


def _is_branch(part: int | str) -> bool:
    return isinstance(part, str) and (not part.islower() or part in BRANCHES)
