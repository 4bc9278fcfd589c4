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
from pydantic_core import to_json, to_jsonable_python

from whet.errors import ConfigError
from whet.runners.context import AttemptContext, active_attempt, get_current_attempt
from whet.types import Endpoint, Span, SpanEvent

F = TypeVar("F", bound=Callable[..., Any])

SCOPE = "whet"
MAX_CHARS = 8192
"""Characters of an argument or a result that are kept."""

_open: ContextVar["Operation | None"] = ContextVar("open_operation", default=None)
"""The innermost open operation, the parent of new spans."""


def _get_parent_id() -> str | None:
    operation = _open.get()
    return operation.id if operation is not None else None


def emit_message(text: str, **attributes: JsonValue) -> None:
    """Record a span `message` with a text for the running attempt."""
    _emit("emit_message", "message", {"whet.message": text, **attributes})


def emit_object(value: object, name: str = "object", **attributes: JsonValue) -> None:
    """Record a JSON value, dataclass or pydantic model as a span of the running attempt.

    Raises:
        ConfigError: it cannot be written as JSON.
    """
    recorded: dict[str, JsonValue] = {
        "whet.object": to_json_value(value),
        "whet.object.type": type(value).__name__,
    }
    _emit("emit_object", name, {**recorded, **attributes})


def _check_attributes(attributes: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Copy attributes of a span. Raises ConfigError if they cannot be written as JSON."""
    return {name: to_json_value(value) for name, value in attributes.items()}


def to_json_value(value: object) -> JsonValue:
    """Convert a value to JSON. Raises ConfigError if it cannot be."""
    try:
        plain = to_jsonable_python(value)
        converted = to_jsonable_python(plain, inf_nan_mode="null")  # also of models
        json.dumps(converted)  # raises for an int that is too long to be written
        return cast(JsonValue, converted)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"expected a value that can be written as JSON, found {type(value).__name__}: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error


class Operation:
    """A span around a block of an agent's code; see `operation`."""

    def __init__(self, name: str, attributes: dict[str, JsonValue]) -> None:
        self._name = name
        self._attributes = _check_attributes(attributes)
        self.id = secrets.token_hex(8)
        """Id of the span."""
        self._started: tuple[AttemptContext, Token[Operation | None], int] | None = None

    def set(self, **attributes: JsonValue) -> None:
        """Add attributes to the span."""
        self._attributes |= _check_attributes(attributes)

    def __enter__(self) -> "Operation":
        context = get_current_attempt("operation")
        self._parent = _get_parent_id()
        self._started = (context, _open.set(self), time.time_ns())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._started is not None
        context, token, start = self._started
        _open.reset(token)
        end = time.time_ns()
        if not context.has_ended:
            context.add_span(
                Span(
                    trace_id=context.trace_id,
                    span_id=self.id,
                    parent_id=self._parent,
                    name=self._name,
                    start=start,
                    end=max(start, end),
                    status="error" if error else "ok",
                    message=f"{type(error).__name__}: {error}"[:MAX_CHARS] if error else "",
                    attributes=self._attributes | _format_error_type(error),
                    events=(_build_exception_event(error, end),) if error else (),
                    scope=SCOPE,
                )
            )


class _Decorator:
    """Result of `operation(...)`: a decorator and a context manager, which attempts may share."""

    def __init__(self, name: str | None, attributes: dict[str, JsonValue]) -> None:
        self._name = name
        self._attributes = attributes

    def __call__(self, function: F) -> F:
        return _decorate(function, self._name or function.__qualname__, self._attributes)

    def __enter__(self) -> Operation:
        if self._name is None:
            raise ConfigError("an operation used as a block needs a name: operation('search')")
        return Operation(self._name, self._attributes).__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        block = _open.get()
        assert block is not None
        block.__exit__(kind, error, trace)


@overload
def operation(name: F, /) -> F: ...
@overload
def operation(name: str | None = None, /, **attributes: JsonValue) -> _Decorator: ...
def operation(name: Any = None, /, **attributes: JsonValue) -> Any:
    """Record a part of an agent as a span: `@operation`, `@operation("search", top_k=3)` or
    `with operation("search") as op`. Operations nest; an exception is recorded in its span.

    The span of a decorated function has its arguments and result. Outside an agent the function
    is called without a span.
    """
    if callable(name):
        function = cast(Callable[..., Any], name)
        return _decorate(function, getattr(function, "__qualname__", str(function)), attributes)
    return _Decorator(name, attributes)


def _decorate(function: F, name: str, attributes: dict[str, JsonValue]) -> F:
    attributes = {"code.function.name": f"{function.__module__}.{name}", **attributes}

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation:
        inputs = {str(index): _serialize(value) for index, value in enumerate(args)}
        inputs |= {key: _serialize(value) for key, value in kwargs.items()}
        return Operation(name, {**attributes, "whet.operation.input": inputs})

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if active_attempt.get() is None:
            return function(*args, **kwargs)
        with begin(args, kwargs) as block:
            result = function(*args, **kwargs)
            block.set(**{"whet.operation.output": _serialize(result)})
            return result

    @functools.wraps(function)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        if active_attempt.get() is None:
            return await function(*args, **kwargs)
        with begin(args, kwargs) as block:
            result = await function(*args, **kwargs)
            block.set(**{"whet.operation.output": _serialize(result)})
            return result

    return cast(F, call_async if inspect.iscoroutinefunction(function) else call)


def _emit(caller: str, name: str, attributes: dict[str, JsonValue]) -> None:
    context = get_current_attempt(caller)
    now = time.time_ns()
    context.add_span(
        Span(
            trace_id=context.trace_id,
            span_id=secrets.token_hex(8),
            parent_id=_get_parent_id(),
            name=name,
            start=now,
            end=now,
            attributes=_check_attributes(attributes),
            scope=SCOPE,
        )
    )


def _serialize(value: object) -> JsonValue:
    """Return a value as JSON if it can be, else its repr; both up to a limit."""
    if isinstance(value, Mapping):
        value = {key: _redact_key(item) for key, item in cast(Mapping[Any, object], value).items()}
    try:
        text = to_json(_redact_key(value), inf_nan_mode="null", fallback=repr)
        if len(text) <= MAX_CHARS:
            return cast(JsonValue, json.loads(text))
    except (ValueError, TypeError, RecursionError):
        pass
    return repr(value)[:MAX_CHARS]


def _redact_key(value: object) -> object:
    """Return an endpoint without its keys."""
    if not isinstance(value, Endpoint):
        return value
    return value.model_copy(update={"api_key": "...", "reward_key": "..."})


def _format_error_type(error: BaseException | None) -> dict[str, JsonValue]:
    return {"error.type": type(error).__qualname__} if error else {}


def _build_exception_event(error: BaseException, at: int) -> SpanEvent:
    return SpanEvent(
        name="exception",
        time=at,
        attributes={
            "exception.type": type(error).__qualname__,
            "exception.message": str(error)[:MAX_CHARS],
            "exception.stacktrace": "".join(traceback.format_exception(error))[-MAX_CHARS:],
        },
    )
