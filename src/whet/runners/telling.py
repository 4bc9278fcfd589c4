"""Spans from inside an agent: messages, objects, operations."""

import functools
import inspect
import json
import secrets
import time
import traceback
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, TypeVar, cast, overload

from pydantic import JsonValue
from pydantic_core import to_json

from whet.errors import ConfigError
from whet.runners.running import Running, inside, running
from whet.types import Endpoint, Span, SpanEvent

F = TypeVar("F", bound=Callable[..., Any])

SCOPE = "whet"
LONGEST = 8192
"""Characters of an argument or a result that are kept."""

_open: ContextVar[str | None] = ContextVar("open_operation", default=None)
"""The span inside which others are made."""


def emit_message(text: str, **attributes: JsonValue) -> None:
    """Say something about the running attempt: a span `message` among those of its store."""
    _emit("emit_message", "message", {"whet.message": text, **attributes})


def emit_object(value: object, name: str = "object", **attributes: JsonValue) -> None:
    """Keep a JSON value, or a dataclass or pydantic model, with the running attempt.

    Raises:
        ConfigError: it cannot be written as JSON.
    """
    kept: dict[str, JsonValue] = {
        "whet.object": as_json(value),
        "whet.object.type": type(value).__name__,
    }
    _emit("emit_object", name, {**kept, **attributes})


def as_json(value: object) -> JsonValue:
    """A value as JSON. Raises ConfigError if it is none."""
    try:
        return cast(JsonValue, json.loads(to_json(value, inf_nan_mode="null")))
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"emit_object takes what can be written as JSON; found {type(value).__name__}: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error


class Operation:
    """A piece of an agent's work, as a block; see `operation`."""

    def __init__(self, name: str, attributes: dict[str, JsonValue]) -> None:
        self._name = name
        self._attributes = dict(attributes)
        self._id = secrets.token_hex(8)
        self._begun: tuple[Running, Token[str | None], int] | None = None

    def set(self, **attributes: JsonValue) -> None:
        """Add to what is known of it."""
        self._attributes |= attributes

    def __enter__(self) -> "Operation":
        now = inside("operation")
        self._parent = _open.get()
        self._begun = (now, _open.set(self._id), time.time_ns())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._begun is not None
        now, token, start = self._begun
        _open.reset(token)
        end = time.time_ns()
        if not now.has_ended:
            now.add_span(
                Span(
                    trace_id=now.trace_id,
                    span_id=self._id,
                    parent_id=self._parent,
                    name=self._name,
                    start=start,
                    end=max(start, end),
                    status="error" if error else "ok",
                    message=f"{type(error).__name__}: {error}"[:LONGEST] if error else "",
                    attributes=self._attributes | _blame(error),
                    events=(_exception(error, end),) if error else (),
                    scope=SCOPE,
                )
            )


class _Decorator:
    """What `operation(...)` gives: a decorator, and a block."""

    def __init__(self, name: str | None, attributes: dict[str, JsonValue]) -> None:
        self._name = name
        self._attributes = attributes
        self._blocks: list[Operation] = []

    def __call__(self, function: F) -> F:
        return _decorated(function, self._name or function.__qualname__, self._attributes)

    def __enter__(self) -> Operation:
        if self._name is None:
            raise ConfigError("an operation that is a block has a name: operation('search')")
        self._blocks.append(Operation(self._name, self._attributes))
        return self._blocks[-1].__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._blocks.pop().__exit__(kind, error, trace)


@overload
def operation(name: F, /) -> F: ...
@overload
def operation(name: str | None = None, /, **attributes: JsonValue) -> _Decorator: ...
def operation(name: Any = None, /, **attributes: JsonValue) -> Any:
    """A piece of an agent's work as a span: `@operation`, `@operation("search", top_k=3)` or
    `with operation("search") as op`. Operations nest; one that raises says why.

    A decorated function keeps its arguments and result with the span, and outside of an agent is
    the function it was.
    """
    if callable(name):
        function = cast(Callable[..., Any], name)
        return _decorated(function, getattr(function, "__qualname__", str(function)), attributes)
    return _Decorator(name, attributes)


def _decorated(function: F, name: str, attributes: dict[str, JsonValue]) -> F:
    attributes = {"code.function.name": f"{function.__module__}.{name}", **attributes}

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation:
        given = {str(place): _said(value) for place, value in enumerate(args)}
        given |= {key: _said(value) for key, value in kwargs.items()}
        return Operation(name, {**attributes, "whet.operation.input": given})

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if running.get() is None:
            return function(*args, **kwargs)
        with begin(args, kwargs) as block:
            result = function(*args, **kwargs)
            block.set(**{"whet.operation.output": _said(result)})
            return result

    @functools.wraps(function)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        if running.get() is None:
            return await function(*args, **kwargs)
        with begin(args, kwargs) as block:
            result = await function(*args, **kwargs)
            block.set(**{"whet.operation.output": _said(result)})
            return result

    return cast(F, call_async if inspect.iscoroutinefunction(function) else call)


def _emit(what: str, name: str, attributes: dict[str, JsonValue]) -> None:
    now = inside(what)
    at = time.time_ns()
    now.add_span(
        Span(
            trace_id=now.trace_id,
            span_id=secrets.token_hex(8),
            parent_id=_open.get(),
            name=name,
            start=at,
            end=at,
            attributes=attributes,
            scope=SCOPE,
        )
    )


def _said(value: object) -> JsonValue:
    """A value as it is kept: JSON as it is, anything else as it shows itself, and not too long."""
    if isinstance(value, Mapping):
        value = {key: _keyless(held) for key, held in cast(Mapping[Any, object], value).items()}
    try:
        text = to_json(_keyless(value), inf_nan_mode="null", fallback=repr)
        if len(text) <= LONGEST:
            return cast(JsonValue, json.loads(text))
    except (ValueError, TypeError, RecursionError):
        pass
    return repr(value)[:LONGEST]


def _keyless(value: object) -> object:
    """An endpoint without its key, which is no one's to read."""
    return value.model_copy(update={"api_key": "..."}) if isinstance(value, Endpoint) else value


def _blame(error: BaseException | None) -> dict[str, JsonValue]:
    return {"error.type": type(error).__qualname__} if error else {}


def _exception(error: BaseException, at: int) -> SpanEvent:
    return SpanEvent(
        name="exception",
        time=at,
        attributes={
            "exception.type": type(error).__qualname__,
            "exception.message": str(error)[:LONGEST],
            "exception.stacktrace": "".join(traceback.format_exception(error))[-LONGEST:],
        },
    )
