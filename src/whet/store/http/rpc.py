"""The store's HTTP API as one table, derived from the protocols.

Each row is a method of `Store`. Its annotations are the schemas of its request and response,
its docstring is the description: the server dispatches by the table, the client sends by it, and
the OpenAPI document lists it.

    in the path           parameters that the path names; everything else of the method is
    in the query          of a GET, PUT or DELETE, or
    in the JSON body      of a POST: an object of parameters by name
    response              JSON of the return value; 204 without a body for None

Three flags change that:

    batched   the body is `{"items": [...]}`, the response `{"errors": [...]}` with null or an
              error for each item: one is refused, the others are done
    polls     the request is held up to `wait_s` seconds; 202 means: not yet, send it again
    keyed     a request sent again with the same `Idempotency-Key` is not done again, and has the
              same response; the other methods are idempotent by their ids
"""

import inspect
import json
import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import NoneType
from typing import Annotated, Any, Generic, Literal, TypeVar, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    create_model,
)

from whet.protocols import Resources, Store
from whet.store.http.errors import ErrorDetail, RefusedRequest
from whet.store.sql_store import SQLStore
from whet.types import Value, find_gateways

T = TypeVar("T")

JSON = "application/json"
ARCHIVE = "application/zip"

MAX_WAIT_S = 30.0
"""Longest time a request is held; a client that still waits sends it again."""
MAX_PAGE = 10_000
MAX_ITEMS = 1_000
MAX_LEASE_S = 7 * 24 * 3600.0

KEY = re.compile(r"[A-Za-z0-9_-]{1,56}")
"""An idempotency key; room is left for the index of a batch's item."""

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}"

PATH_PATTERNS: dict[str, str] = {
    "run": _NAME,
    "rollout": _NAME,
    "attempt": r"[A-Za-z0-9][A-Za-z0-9_.-]{0,159}",
    "name": _NAME,
    "version": r"[0-9]{1,9}",
    "step": r"[0-9]{1,9}",
    "key": r"[A-Za-z0-9_-]{1,64}",
}
"""Path parameters: nothing that needs quoting, and no way out of the path."""

_BOUNDS: dict[str, Any] = {  # Any: annotations
    "worker": Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f]{1,256}$")],
    "lease_s": Annotated[FiniteFloat, Field(gt=0, le=MAX_LEASE_S)],
    "wait_s": Annotated[FiniteFloat, Field(ge=0, le=MAX_WAIT_S)],
    "before": FiniteFloat,
    "limit": Annotated[int, Field(ge=0, le=MAX_PAGE)],
    "idempotency_key": Annotated[str | None, Field(pattern=f"^{KEY.pattern}$")],
}
"""Limits of parameters that arrive from outside, by name."""
_BOUNDED_INT = Annotated[int, Field(ge=-1, lt=2**31)]
_POLL_S = Annotated[FiniteFloat, Field(ge=0.1, le=MAX_WAIT_S)]
"""Time that one request waits for a method without a limit: long enough to check once."""

_FORBID = ConfigDict(extra="forbid")


class BatchResult(Value):
    """Outcome of each item of a batch, in order: null, or why it was refused."""

    errors: tuple[ErrorDetail | None, ...]


@dataclass(frozen=True)
class RemoteMethod(Generic[T]):
    """One row of the table: a method of the store at a path."""

    verb: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    function: Callable[..., Coroutine[Any, Any, T]]
    batched: bool = False
    polls: bool = False
    keyed: bool = False
    archive: bool = False
    """Whether the body is a file: of the request of a PUT, else of the response."""

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def summary(self) -> str:
        """First sentence of the method's docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the method's parameters."""
        return tuple(inspect.signature(self.function).parameters)[1:]

    @cached_property
    def path_parameters(self) -> tuple[str, ...]:
        """Names of the parameters in the path, the run included."""
        return tuple(re.findall(r"\{(\w+)\}", self.path))

    @cached_property
    def request(self) -> type[BaseModel]:
        """Model of the parameters outside of the path; of one item if `batched`."""
        hints = get_type_hints(self.function, include_extras=True)
        fields: dict[str, Any] = {}  # Any: pairs of annotation and default
        for name, parameter in list(inspect.signature(self.function).parameters.items())[1:]:
            if name not in self.path_parameters and not self.archive:
                fields[name] = _build_field(name, hints[name], parameter.default)
        if self.polls and "wait_s" not in fields:
            fields["wait_s"] = (_POLL_S, MAX_WAIT_S)
        model = f"{self.name.title().replace('_', '')}Request"
        return create_model(model, __config__=_FORBID, **fields)

    @cached_property
    def body(self) -> TypeAdapter[Any]:  # Any: its model is made above
        """Adapter of the request's JSON body."""
        if not self.batched:
            return TypeAdapter(self.request)
        items = Annotated[tuple[self.request, ...], Field(max_length=MAX_ITEMS)]
        model = f"{self.name.title()}Batch"
        return TypeAdapter(create_model(model, __config__=_FORBID, items=(items, ...)))

    @cached_property
    def returns(self) -> Any:  # Any: an annotation
        """Annotation of the return value."""
        return get_type_hints(self.function, include_extras=True)["return"]

    @cached_property
    def response(self) -> TypeAdapter[T]:
        """Adapter of the response's body."""
        return TypeAdapter(self.returns)

    @property
    def is_silent(self) -> bool:
        """Whether a success has no body."""
        return self.returns is NoneType and not self.batched

    async def call(self, store: SQLStore, arguments: Mapping[str, Any]) -> T:  # Any: validated
        """Call the method on a store."""
        if self.function is gateways:  # of this module, not of the store
            return await self.function(store, **arguments)
        return await getattr(store, self.name)(**arguments)

    def url(self, **path: object) -> str:
        """Path of a request. The values need no quoting, or are quoted."""
        return self.path.format_map(path)


def _build_field(
    name: str, hint: Any, default: Any
) -> tuple[Any, Any]:  # Any: annotations and defaults
    if name == "limit" and default is None:
        default = MAX_PAGE  # a response is never longer than a page
    if hint is int:
        hint = _BOUNDED_INT
    required = default is inspect.Parameter.empty
    return _BOUNDS.get(name, hint), ... if required else default


class GatewayInfo(Value):
    """A gateway that serves the run's model."""

    url: str
    """Agents call `/v1` below it, with an attempt's key."""
    model: str


async def gateways(store: Resources) -> list[GatewayInfo]:
    """Return where the run's model is served now; empty while no `whet serve` serves it."""
    found = find_gateways(await store.resources())
    return [GatewayInfo(url=each.url, model=each.model) for each in found]


def parse_json(adapter: TypeAdapter[T], body: bytes) -> T:
    """Parse and validate a body. Raises RefusedRequest or pydantic's ValidationError."""
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        if error.errors(include_url=False)[0]["type"] != "json_invalid":
            raise
    try:  # Python's parser also takes lone surrogates and deeper nesting
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(400, f"the body is not JSON: {error}") from error
    return adapter.validate_python(value)


_RUN = "/v1/runs/{run}"
_ROLLOUTS = f"{_RUN}/rollouts"
_ATTEMPT = f"{_RUN}/attempts/{{attempt}}"
_RESOURCES = f"{_RUN}/resources"

_TABLE: tuple[RemoteMethod[Any], ...] = (  # Any: each row has its own; the most frequent first
    RemoteMethod("POST", f"{_RUN}/calls", Store.append, batched=True),
    RemoteMethod("POST", f"{_RUN}/claims", Store.claim, polls=True, keyed=True),
    RemoteMethod("POST", f"{_RUN}/outcomes", Store.finish, batched=True, keyed=True),
    RemoteMethod("POST", f"{_RUN}/rewards", Store.emit, batched=True, keyed=True),
    RemoteMethod("POST", f"{_RUN}/heartbeats", Store.heartbeat, batched=True),
    RemoteMethod("POST", f"{_RUN}/spans", Store.record, batched=True),
    RemoteMethod("GET", _ATTEMPT, Store.attempt),
    RemoteMethod("GET", f"{_ATTEMPT}/calls", Store.calls),
    RemoteMethod("GET", f"{_ATTEMPT}/rewards", Store.rewards),
    RemoteMethod("GET", f"{_ATTEMPT}/spans", Store.spans),
    RemoteMethod("GET", f"{_ATTEMPT}/end", Store.ended, polls=True),
    RemoteMethod("DELETE", f"{_RUN}/claims/{{key}}", SQLStore.give_back),
    RemoteMethod("POST", _ROLLOUTS, Store.enqueue),
    RemoteMethod("GET", _ROLLOUTS, Store.rollouts),
    RemoteMethod("POST", f"{_ROLLOUTS}/wait", Store.wait, polls=True),
    RemoteMethod("POST", f"{_ROLLOUTS}/cancel", Store.cancel, keyed=True),
    RemoteMethod("POST", f"{_ROLLOUTS}/trajectories", Store.trajectories),
    RemoteMethod("POST", f"{_ROLLOUTS}/failures", Store.failures),
    RemoteMethod("GET", f"{_ROLLOUTS}/{{rollout}}/attempts", Store.attempts),
    RemoteMethod("POST", f"{_RUN}/steps", Store.commit),
    RemoteMethod("GET", f"{_RUN}/steps", Store.steps),
    RemoteMethod("GET", f"{_RUN}/steps/{{step}}/advantages", Store.advantages),
    RemoteMethod("POST", f"{_RESOURCES}/{{name}}", Store.publish, keyed=True),
    RemoteMethod("GET", _RESOURCES, Store.resources),
    RemoteMethod("GET", f"{_RESOURCES}/{{name}}", Store.latest),
    RemoteMethod("GET", f"{_RESOURCES}/{{name}}/{{version}}", Store.get),
    RemoteMethod("GET", f"{_RUN}/gateways", gateways),
    RemoteMethod("GET", f"{_RUN}/workers", Store.workers),
    RemoteMethod("POST", f"{_RUN}/workers/release", Store.release_workers, keyed=True),
    RemoteMethod("GET", f"{_RUN}/counts", Store.counts),
    RemoteMethod("POST", f"{_RUN}/prune", Store.prune, keyed=True),
    RemoteMethod("GET", f"{_RUN}/archive", Store.export, archive=True),
    RemoteMethod("PUT", f"{_RUN}/archive", Store.load, archive=True, keyed=True),
    RemoteMethod("DELETE", _RUN, Store.drop, keyed=True),
    RemoteMethod("GET", "/v1/size", Store.size),
    RemoteMethod("POST", "/v1/vacuum", Store.vacuum),
)

METHODS: dict[str, RemoteMethod[Any]] = {row.name: row for row in _TABLE}
"""By the name of the method."""
