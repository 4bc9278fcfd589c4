"""Dialogues and preference pairs from JSON, in the formats of OpenAI's fine-tuning and of TRL."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import JsonValue, TypeAdapter, ValidationError

from whet.app.inputs import read_jsonl
from whet.errors import ConfigError, RequestError
from whet.gateway.dialects.chat import ChatMessage, ChatTool, to_canonical
from whet.gateway.messages import Message
from whet.gateway.templates.renderer import Renderer
from whet.training.supervised import SupervisedExample
from whet.types import GenerationId, Row, SampledSegment

T = TypeVar("T")

Dialogues = (
    str | Path | Sequence[Any]
)  # Any: a JSON value, whatever the caller's dicts are typed as
"""A list, or a file with one JSON object a line."""

Object = Mapping[str, JsonValue]

_MESSAGE: TypeAdapter[ChatMessage] = TypeAdapter(ChatMessage)

READ_KEYS = frozenset(
    (
        *("messages", "tools", "prompt", "completion", "chosen", "rejected"),
        *("input", "preferred_output", "non_preferred_output"),
    )
)
"""Keys of an example that are read; the other columns of a dataset may be of any type."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation, and the assistant turns of it to train."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[JsonValue, ...]
    trained: tuple[int, ...]
    """Indices of messages."""


def load_dialogues(source: Dialogues) -> list[Dialogue]:
    """Read dialogues: `{"messages": [...]}` or `{"prompt": ..., "completion": ...}`, with `tools`.

    Raises:
        ConfigError: the file cannot be read or is empty, or a dialogue is invalid.
    """
    return _load(source, "dialogue", _read_dialogue)


def load_pairs(source: Dialogues) -> list[tuple[Dialogue, Dialogue]]:
    """Read pairs of a chosen and a rejected dialogue: `{"prompt", "chosen", "rejected"}`.

    OpenAI's names of the same are `input`, `preferred_output` and `non_preferred_output`.

    Raises:
        ConfigError: the file cannot be read or is empty, or a pair is invalid.
    """
    return _load(source, "pair", _read_pair)


def render_dialogue(dialogue: Dialogue, renderer: Renderer) -> tuple[Row, ...]:
    """Build the rows of a dialogue: one, or several where its template rewrites earlier turns.

    Each trained turn follows the prompt that a gateway would send to a model for it, rendered in
    full. A row goes on as long as that prompt begins with the row, token by token.

    Raises:
        ConfigError: the template does not render the dialogue.
    """
    rows: list[Row] = []
    tokens: list[int] = []
    segments: list[SampledSegment] = []

    def end_row() -> None:
        if segments:
            rows.append(Row(tuple(tokens), tuple(segments), dialogue.name, dialogue.name))

    for index in dialogue.trained:
        before, turn = dialogue.messages[:index], dialogue.messages[index]
        try:
            prompt, sampled = renderer.render_turn(before, turn, dialogue.tools)
        except RequestError as error:
            raise ConfigError(f"{dialogue.name}, message {index + 1}: {error}") from error
        if prompt[: len(tokens)] != tokens:
            end_row()
            segments = []
        segments.append(_build_segment(f"{dialogue.name}.{index}", len(prompt), len(sampled)))
        tokens = [*prompt, *sampled]
    end_row()
    return tuple(rows)


def imitate(dialogue: Dialogue, renderer: Renderer) -> SupervisedExample:
    """Make a dialogue an example. Raises ConfigError as `render_dialogue` does."""
    return SupervisedExample(dialogue.name, render_dialogue(dialogue, renderer))


def prefer(pair: tuple[Dialogue, Dialogue], renderer: Renderer) -> SupervisedExample:
    """Make a pair an example. Raises ConfigError as `render_dialogue` does, or for equal sides."""
    chosen, rejected = (render_dialogue(side, renderer) for side in pair)
    if [row.tokens for row in chosen] == [row.tokens for row in rejected]:
        raise ConfigError(f"{pair[0].name}: chosen and rejected are the same")
    return SupervisedExample(pair[0].name, chosen, rejected)


def _build_segment(id: str, start: int, length: int) -> SampledSegment:
    return SampledSegment(
        generation=GenerationId(id),
        start=start,
        logprobs=(0.0,) * length,
        versions=(0,) * length,
        advantages=(1.0,) * length,
        weight=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
    )


# ------------------------------------------------------------------- formats


def _load(source: Dialogues, what: str, read: Callable[[Object, str], T]) -> list[T]:
    values = list(_read_values(source, what))
    if not values:
        raise ConfigError(f"there are no {what}s: give at least one")
    objects = [(name, _as_object(value, name)) for name, value in values]
    for name, value in objects:
        columns = {key: each for key, each in value.items() if key in READ_KEYS}
        try:
            json.dumps(columns, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:  # such as a lone surrogate
            raise ConfigError(f"{name} is not JSON in UTF-8: {error}") from error
    return [read(value, name) for name, value in objects]


def _read_values(source: Dialogues, what: str) -> Iterator[tuple[str, JsonValue]]:
    if isinstance(source, (str, Path)):
        for number, value in read_jsonl(Path(source), f"{what}s"):
            yield f"{str(source)!r} line {number}", value
    else:
        for number, value in enumerate(source, start=1):
            yield f"{what} {number}", value


def _read_dialogue(value: Object, name: str) -> Dialogue:
    if "messages" in value:
        messages, weights = _read_messages(value["messages"], "messages", name)
        trained = [n for n, m in enumerate(messages) if m.role == "assistant" and weights[n]]
        if not trained:
            raise ConfigError(f"{name}: there is no assistant message to train")
        return Dialogue(name, messages, _read_tools(value, name), tuple(trained))
    if "completion" in value:
        return _complete(value, value.get("prompt"), "completion", name)
    expected = "'messages', or 'prompt' and 'completion'"
    raise ConfigError(f"{name}: expected {expected}, found {_list_keys(value)}")


def _read_pair(value: Object, name: str) -> tuple[Dialogue, Dialogue]:
    if "preferred_output" in value:
        request = _as_object(value.get("input"), f"{name}: input")
        prompt, keys = request.get("messages"), ("preferred_output", "non_preferred_output")
        value = {**value, "tools": request.get("tools")}
    else:
        prompt, keys = value.get("prompt"), ("chosen", "rejected")
    missing = [key for key in keys if key not in value]
    if missing:
        raise ConfigError(
            f"{name}: expected 'prompt', 'chosen' and 'rejected', found {_list_keys(value)}"
        )
    chosen, rejected = (_complete(value, prompt, key, name) for key in keys)
    return chosen, rejected


def _complete(value: Object, prompt: JsonValue, key: str, name: str) -> Dialogue:
    """A prompt and its completion, whose assistant turns are trained."""
    before: tuple[Message, ...] = ()
    if prompt is not None:
        before, _ = _read_messages(_as_messages(prompt, "user"), "prompt", name)
    after, _ = _read_messages(_as_messages(value[key], "assistant"), key, name)
    messages = (*before, *after)
    trained = [n for n in range(len(before), len(messages)) if messages[n].role == "assistant"]
    if not trained:
        raise ConfigError(f"{name}: {key!r} has no assistant message")
    return Dialogue(name, messages, _read_tools(value, name), tuple(trained))


def _as_messages(value: JsonValue, role: str) -> JsonValue:
    """A text as one message; OpenAI allows a single message as an object."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return [value] if isinstance(value, dict) else value


def _read_messages(
    value: JsonValue, key: str, name: str
) -> tuple[tuple[Message, ...], list[float]]:
    """Messages in canonical form, with the weight of each."""
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{name}: expected {key!r} to be a list of messages, found {value!r:.60}")
    messages: list[Message] = []
    weights: list[float] = []
    open_calls: list[str] = []
    for index, each in enumerate(value):
        where = f"{name}: {key}.{index}"
        filled = _fill_in(_as_object(each, where), index, open_calls)
        weight = filled.pop("weight", 1)
        if weight not in (0, 1):
            raise ConfigError(f"{where}.weight: expected 0 or 1, found {weight!r:.60}")
        try:
            messages.append(to_canonical(_MESSAGE.validate_python(filled), index))
        except ValidationError as error:
            raise ConfigError(f"{where}{_explain(error)}") from error
        except RequestError as error:
            raise ConfigError(f"{name}: {error}") from error
        weights.append(float(weight))
    return tuple(messages), weights


def _fill_in(message: Object, index: int, open_calls: list[str]) -> dict[str, Any]:
    """Add what TRL's format leaves out: ids of tool calls, and arguments as text."""
    filled: dict[str, Any] = dict(message)
    calls: list[Any] = []
    written = message.get("tool_calls")
    for number, call in enumerate(written if isinstance(written, list) else []):
        if isinstance(call, dict) and isinstance(function := call.get("function", call), dict):
            arguments = function.get("arguments", {})
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            id = call.get("id") or f"call_{index}_{number}"
            open_calls.append(str(id))
            call = {"id": id, "function": {**function, "arguments": arguments}}
        calls.append(call)
    if isinstance(written, list):
        filled["tool_calls"] = calls
    if message.get("role") == "tool" and open_calls:
        id = message.get("tool_call_id") or open_calls[0]
        filled["tool_call_id"] = id
        if id in open_calls:
            open_calls.remove(str(id))
    return filled


def _read_tools(value: Object, name: str) -> tuple[JsonValue, ...]:
    tools = value.get("tools") or []
    if not isinstance(tools, list):
        raise ConfigError(f"{name}: expected 'tools' to be a list, found {tools!r:.60}")
    found: list[JsonValue] = []
    for index, tool in enumerate(tools):
        try:
            found.append(cast(JsonValue, ChatTool.model_validate(tool).to_canonical()))
        except ValidationError as error:
            raise ConfigError(f"{name}: tools.{index}{_explain(error)}") from error
    return tuple(found)


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    where = "".join(f".{part}" for part in first["loc"])
    return f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}, found {first['input']!r:.60}"


def _as_object(value: JsonValue, where: str) -> Object:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a JSON object, found {value!r:.60}")
    return value


def _list_keys(value: Object) -> str:
    return ", ".join(map(repr, value)) or "an empty object"
