"""The store's methods over HTTP: each is a POST with its arguments as JSON, typed on both sides."""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, create_model

from whet.agl.spans import Span
from whet.agl.store.base import LightningStore
from whet.agl.types import Unset

PREFIX = "/v1/agl/call/"
HEALTH = "/v1/agl/health"
NOT_REMOTE = {
    *("add_otel_span", "add_span", "enqueue_rollout", "dequeue_rollout"),
    *("get_next_span_sequence_id", "otlp_traces_endpoint", "capabilities"),
}
"""Methods that the base class implements by calling the others."""

ADDS_SPANS = "add_many_spans"
"""Method that returns spans of its arguments. They are large: the reply has only positions."""
POSITIONS = TypeAdapter(list[int])


class Method(NamedTuple):
    """A method: its arguments as a model, and the type of its result."""

    name: str
    arguments: type[BaseModel]
    result: TypeAdapter[Any]  # Any: each method has its own

    def dump_arguments(self, values: dict[str, object]) -> bytes:
        """Return arguments as JSON, without those that are unset. Raises ValueError."""
        passed = {name: v for name, v in values.items() if not isinstance(v, Unset)}
        return self.arguments(**passed).model_dump_json(include=set(passed)).encode()

    def dump_result(self, values: dict[str, Any], result: Any) -> bytes:
        """Return a result as JSON; for added spans, only their positions in the arguments."""
        if self.name == ADDS_SPANS:
            return POSITIONS.dump_json(_find_positions(values["spans"], result))
        return self.result.dump_json(result)

    def load_result(self, values: dict[str, Any], body: bytes) -> Any:
        """Return the result of a call from JSON. Raises pydantic's ValidationError."""
        if self.name != ADDS_SPANS:
            return self.result.validate_json(body)
        return [values["spans"][position] for position in POSITIONS.validate_json(body)]

    def load_arguments(self, body: bytes) -> dict[str, Any]:
        """Return the arguments of a call from JSON. Raises pydantic's ValidationError."""
        read = self.arguments.model_validate_json(body or b"{}")
        return {name: getattr(read, name) for name in read.model_fields_set}


def _find_positions(sent: Sequence[Span], result: Sequence[Span]) -> list[int]:
    """Return the positions of added spans; of several with one id only the first was added."""
    added = {(span.rollout_id, span.attempt_id, span.span_id) for span in result}
    positions: list[int] = []
    for position, span in enumerate(sent):
        key = span.rollout_id, span.attempt_id, span.span_id
        if key in added:
            added.discard(key)
            positions.append(position)
    return positions


def _build_method(name: str) -> Method:
    function = getattr(LightningStore, name)
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        is_required = parameter.default is parameter.empty
        hint = _remove_unset(hints[parameter.name])
        fields[parameter.name] = (hint, ... if is_required else None)
    config = ConfigDict(extra="forbid")
    arguments = create_model(f"Arguments_{name}", __config__=config, **fields)
    return Method(name, arguments, TypeAdapter(hints["return"]))


def _remove_unset(hint: Any) -> Any:
    """Return the type of an argument on the wire, where an unset argument is left out."""
    members = getattr(hint, "__args__", ())
    if Unset not in members:
        return hint
    left = [member for member in members if member is not Unset]
    return left[0] if len(left) == 1 else left[0] | left[1] if len(left) == 2 else Any


METHODS = {
    name: _build_method(name)
    for name, value in vars(LightningStore).items()
    if inspect.iscoroutinefunction(value) and name not in NOT_REMOTE
}
