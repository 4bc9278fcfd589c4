"""`emit_*`: rewards, messages, objects, exceptions and operations of an attempt, as spans."""

import base64
import functools
import inspect
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar, cast

from pydantic import BaseModel, TypeAdapter

from whet.agl.semconv import (
    AGL_ANNOTATION,
    AGL_EXCEPTION,
    AGL_MESSAGE,
    AGL_OBJECT,
    AGL_OPERATION,
    Attributes,
    LightningSpanAttributes,
    flatten_attributes,
    sanitize_attributes,
    unflatten_attributes,
)
from whet.agl.spans import SpanCoreFields
from whet.agl.tracer import (
    DummyTracer,
    SpanRecordingContext,
    Tracer,
    describe_exception,
    get_active_tracer,
)

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S")

_REWARD = LightningSpanAttributes.REWARD.value
_INPUT = LightningSpanAttributes.OPERATION_INPUT.value
_OUTPUT = LightningSpanAttributes.OPERATION_OUTPUT.value


class RewardDimension(BaseModel):
    """A named number of a reward; the first one is primary."""

    name: str
    value: float


_DIMENSIONS = TypeAdapter(list[RewardDimension])


def emit_annotation(annotation: dict[str, Any], propagate: bool = True) -> SpanCoreFields:
    """Record a span with attributes; nested ones are flattened.

    Raises:
        RuntimeError: there is no tracer, unless `propagate` is false.
    """
    attributes = sanitize_attributes(flatten_attributes(annotation))
    return _find_tracer(propagate).create_span(AGL_ANNOTATION, attributes)


def emit_reward(
    reward: float | dict[str, Any],
    *,
    primary_key: str | None = None,
    attributes: dict[str, Any] | None = None,
    propagate: bool = True,
) -> SpanCoreFields:
    """Record a reward: a number, or several by name, of which `primary_key` names the main one.

    Raises:
        TypeError: the reward is not a number.
        ValueError: one of several is not a number, or `primary_key` names none of them.
    """
    if isinstance(reward, dict):
        for key, value in reward.items():
            if not isinstance(value, (int, float)):
                raise ValueError(f"invalid reward {key!r}: expected a number, found {type(value)}")
        if primary_key is None:
            raise ValueError(
                "a reward with several numbers needs a primary_key: pass the name of the main one"
            )
        if primary_key not in reward:
            raise ValueError(f"primary_key {primary_key!r} is not among {list(reward)}")
        names = [primary_key, *(key for key in reward if key != primary_key)]
        dimensions = [{"name": name, "value": float(reward[name])} for name in names]
    elif isinstance(cast(object, reward), (int, float)):
        dimensions = [{"name": "primary", "value": float(reward)}]
    else:
        raise TypeError(f"invalid reward: expected a number, found {type(reward)}")
    return emit_annotation({_REWARD: dimensions, **(attributes or {})}, propagate=propagate)


def emit_message(
    message: str, attributes: dict[str, Any] | None = None, propagate: bool = True
) -> None:
    """Record a text. Raises TypeError for any other value."""
    if not isinstance(cast(object, message), str):
        raise TypeError(f"Message must be a string, got: {type(message)}.")
    body = {LightningSpanAttributes.MESSAGE_BODY.value: message}
    _emit(AGL_MESSAGE, body, attributes, propagate)


def emit_object(
    object: Any, attributes: dict[str, Any] | None = None, propagate: bool = True
) -> SpanCoreFields:
    """Record a JSON value or bytes. Raises RuntimeError if it is neither."""
    kind, literal, as_json = (
        LightningSpanAttributes.OBJECT_TYPE.value,
        LightningSpanAttributes.OBJECT_LITERAL.value,
        LightningSpanAttributes.OBJECT_JSON.value,
    )
    if isinstance(object, (str, int, float, bool)):
        recorded = {kind: type(object).__name__, literal: str(object)}
    elif isinstance(object, bytes):
        recorded = {kind: "bytes", literal: base64.b64encode(object).decode()}
    else:
        try:
            text = json.dumps(object)
        except (TypeError, ValueError) as error:
            raise RuntimeError(f"an object must be JSON; found {type(object)}") from error
        module, name = type(object).__module__, type(object).__qualname__
        name = name if module == "builtins" else f"{module}.{name}"
        recorded = {kind: name, as_json: text}
    return _emit(AGL_OBJECT, recorded, attributes, propagate)


def emit_exception(
    exception: BaseException, attributes: dict[str, Any] | None = None, propagate: bool = True
) -> None:
    """Record an exception. Raises TypeError for any other value."""
    if not isinstance(cast(object, exception), BaseException):
        raise TypeError(f"Expected a BaseException instance, got: {type(exception)}.")
    _emit(AGL_EXCEPTION, describe_exception(exception), attributes, propagate)


def _emit(
    name: str, recorded: Attributes, attributes: dict[str, Any] | None, propagate: bool
) -> SpanCoreFields:
    more = sanitize_attributes(flatten_attributes(attributes)) if attributes else {}
    return _find_tracer(propagate).create_span(name, {**recorded, **more})


def _find_tracer(propagate: bool) -> Tracer:
    if not propagate:
        return DummyTracer()
    tracer = get_active_tracer()
    if tracer is None:
        raise RuntimeError(
            "no active tracer: emit inside an agent that a runner executes, or with propagate=False"
        )
    return tracer


# --------------------------------------------------------------------------- operations


class OperationContext:
    """A span around a block or a function; see `operation`."""

    def __init__(self, attributes: dict[str, Any], propagate: bool) -> None:
        self._attributes = sanitize_attributes(flatten_attributes(attributes))
        self._propagate = propagate
        self._opened: AbstractContextManager[SpanRecordingContext] | None = None
        self._span: SpanRecordingContext | None = None

    def __enter__(self) -> "OperationContext":
        self._opened = self._open(self._attributes)
        self._span = self._opened.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._opened is not None
        self._opened.__exit__(kind, error, trace)

    def set_input(self, *args: Any, **kwargs: Any) -> None:
        """Record the input."""
        self._set(_INPUT, {"args": list(args), **kwargs} if args else kwargs)

    def set_output(self, output: Any) -> None:
        """Record the output."""
        self._set(_OUTPUT, output)

    def _set(self, key: str, value: Any) -> None:
        if self._span is None:
            raise RuntimeError(
                "the operation has not started: use it as `with operation(...) as op`"
            )
        self._span.record_attributes(sanitize_attributes(flatten_attributes({key: value})))

    def _open(self, attributes: Attributes) -> AbstractContextManager[SpanRecordingContext]:
        return _find_tracer(self._propagate).operation_context(AGL_OPERATION, attributes)

    def __call__(self, function: F) -> F:
        named = {LightningSpanAttributes.OPERATION_NAME.value: function.__name__}
        attributes = {**named, **self._attributes}
        signature = inspect.signature(function)

        def record_input(span: SpanRecordingContext, args: Any, kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            values = {key: _convert_tuple(value) for key, value in bound.arguments.items()}
            span.record_attributes(sanitize_attributes(flatten_attributes({_INPUT: values})))

        def record_output(span: SpanRecordingContext, value: Any) -> None:
            span.record_attributes(sanitize_attributes(flatten_attributes({_OUTPUT: value})))

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            with self._open(attributes) as span:
                record_input(span, args, kwargs)
                result = await function(*args, **kwargs)
                record_output(span, result)
                return result

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._open(attributes) as span:
                record_input(span, args, kwargs)
                result = function(*args, **kwargs)
                record_output(span, result)
                return result

        return cast(F, call_async if inspect.iscoroutinefunction(function) else call)


def _convert_tuple(value: Any) -> Any:
    return list(cast(tuple[object, ...], value)) if isinstance(value, tuple) else value


def operation(
    fn: Any = None, *, propagate: bool = True, name: str | None = None, **attributes: Any
) -> Any:
    """Record a part of an agent: `@operation`, `@operation(...)` or `with operation(...) as op`."""
    if name is not None:
        attributes[LightningSpanAttributes.OPERATION_NAME.value] = name
    context = OperationContext(attributes, propagate)
    if fn is None:
        return context
    if not callable(fn):
        raise ValueError("operation() takes a function, not a name: pass name='...'")
    return context(cast(Callable[..., Any], fn))


# --------------------------------------------------------------------------- reading spans


def get_rewards_from_span(span: Any) -> list[RewardDimension]:
    """Return the rewards of a span, the primary one first. Any: it may be OpenTelemetry's."""
    attributes = dict(span.attributes or {})
    if not any(key.startswith(f"{_REWARD}.") for key in attributes):
        return []
    return _DIMENSIONS.validate_python(unflatten_attributes(attributes, _REWARD))


def get_reward_value(span: Any) -> float | None:
    """Return the primary reward of a span."""
    rewards = get_rewards_from_span(span)
    if rewards:
        return rewards[0].value
    if span.name == AGL_ANNOTATION and span.attributes:  # as version 0.2 wrote it
        return span.attributes.get("reward")
    return None


def is_reward_span(span: Any) -> bool:
    """Return whether a span is a reward."""
    return get_reward_value(span) is not None


def find_reward_spans(spans: Sequence[S]) -> list[S]:
    """Return the spans that are rewards."""
    return [span for span in spans if is_reward_span(span)]


def find_final_reward(spans: Sequence[Any]) -> float | None:
    """Return the last reward of the spans."""
    for span in reversed(spans):
        value = get_reward_value(span)
        if value is not None:
            return value
    return None


def get_message_value(span: Any) -> str | None:
    """Return the text of a message span."""
    return _read_attributes(span).get(LightningSpanAttributes.MESSAGE_BODY.value)


def get_object_value(span: Any) -> Any:
    """Return the value of an object span."""
    attributes = _read_attributes(span)
    text = attributes.get(LightningSpanAttributes.OBJECT_JSON.value)
    if text is not None:
        return json.loads(text)
    literal = attributes.get(LightningSpanAttributes.OBJECT_LITERAL.value)
    if literal is None:
        return None
    match attributes.get(LightningSpanAttributes.OBJECT_TYPE.value, "str"):
        case "str":
            return literal
        case "int":
            return int(literal)
        case "float":
            return float(literal)
        case "bool":
            return literal.lower() == "true"
        case "bytes":
            return base64.b64decode(literal)
        case other:
            raise RuntimeError(f"unknown type {other!r} of an object span")


def _read_attributes(span: Any) -> Attributes:
    return dict(span.attributes or {})


class _Reward:
    """`@reward`, which emits what a function returns; `reward.emit_reward` is `emit_reward`."""

    emit_reward = staticmethod(emit_reward)

    def __call__(self, function: F) -> F:
        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            result = await function(*args, **kwargs)
            emit_reward(result)
            return result

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            emit_reward(result)
            return result

        return cast(F, call_async if inspect.iscoroutinefunction(function) else call)


reward = _Reward()
