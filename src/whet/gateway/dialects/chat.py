"""OpenAI Chat Completions, with the fields vLLM adds."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal, Required

from pydantic import ConfigDict, Field, JsonValue, with_config
from typing_extensions import TypedDict

from whet.gateway.dialects.dialect import Dialect, Json, Reply
from whet.gateway.dialects.wire import (
    DONE,
    OPENAI_ERRORS,
    AnyJson,
    Count,
    Lenient,
    One,
    SamplingFields,
    StopStrings,
    Tools,
    TopsByToken,
    Wire,
    Zero,
    build_tool,
    format_event,
    format_logprobs,
    format_usage,
    parse_body,
    read_text,
)
from whet.gateway.graph import Graph
from whet.gateway.messages import Message, Role, ToolCall
from whet.gateway.requests import CompletedCall, ModelRequest, PreparedCall
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.constraint import ANY_OBJECT, Constraint, Schema, build_constraint
from whet.gateway.templates.detokenize import Delta
from whet.types import Generation, TokenChunk

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class _Function(Lenient):
    name: str
    arguments: str = ""


class _ToolCall(Lenient):
    id: str
    type: Literal["function"] = "function"
    function: _Function


@with_config(Lenient.model_config)
class ChatMessage(TypedDict, total=False):
    """A message of Chat Completions.

    A dictionary, since each request repeats all messages before it: a model for each of them
    would take half as long again.
    """

    role: Required[Literal["system", "developer", "user", "assistant", "tool"]]
    content: AnyJson
    tool_calls: Annotated[list[_ToolCall], Field(fail_fast=True)] | None
    tool_call_id: str | None
    name: str | None
    reasoning: AnyJson
    reasoning_content: AnyJson


def to_canonical(message: ChatMessage, index: int) -> Message:
    """Convert a message to canonical form. Raises RequestError that names an invalid part."""
    role, content = ROLES[message["role"]], message.get("content")
    if isinstance(content, str) and len(message) == 2:  # the common case
        return Message(role, content)
    if not isinstance(content, str):
        kinds = ("text", "refusal") if role == "assistant" else ("text",)
        images = ("image_url",) if role == "tool" else ()
        content = read_text(content, f"messages.{index}.content", kinds, images=images)
    calls = message.get("tool_calls") or ()
    thought = message.get("reasoning") or message.get("reasoning_content")
    return Message(
        role,
        content,
        tuple([ToolCall(c.id, c.function.name, c.function.arguments) for c in calls]),
        message.get("tool_call_id") or "",
        thought if isinstance(thought, str) and role == "assistant" else "",
        message.get("name") or "",
    )


class _ToolFunction(Lenient):
    model_config = ConfigDict(extra="allow", strict=True)
    name: str
    description: str | None = None
    parameters: dict[str, AnyJson] | None = None

    @property
    def more(self) -> Json:
        return self.model_extra or {}


class ChatTool(Lenient):
    """A tool of Chat Completions."""

    type: Literal["function"]
    function: _ToolFunction

    def to_canonical(self) -> Json:
        """Convert to the form that templates use."""
        function = self.function
        return build_tool(function.name, function.description, function.parameters, function.more)


class StreamOptions(Wire):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: AnyJson = None


class TextFormat(Wire):
    """A response of any text."""

    type: Literal["text"]


class ObjectFormat(Wire):
    """A response of any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Wire):
    """The JSON schema of a response."""

    name: str
    description: str | None = None
    definition: Annotated[dict[str, JsonValue] | None, Field(alias="schema")] = None
    strict: bool | None = None


class _SchemaFormat(Wire):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class _Named(Wire):
    name: str


class _NamedChoice(Wire):
    type: Literal["function"]
    function: _Named


class ChatRequest(SamplingFields):
    """The supported fields; any other field, or a value outside its type, is a 400."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    tools: Tools[ChatTool] = ()
    tool_choice: Literal["auto", "none", "required"] | _NamedChoice = "auto"
    parallel_tool_calls: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: str | StopStrings | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    return_token_ids: bool = False
    response_format: Annotated[
        TextFormat | ObjectFormat | _SchemaFormat | None, Field(discriminator="type")
    ] = None
    # Accepted only with values that change nothing.
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    min_p: Zero | None = None
    repetition_penalty: One | None = None
    logit_bias: Annotated[dict[str, JsonValue], Field(max_length=0)] | None = None
    modalities: list[Literal["text"]] | None = None
    include_reasoning: Literal[True] | None = None
    skip_special_tokens: Literal[True] | None = None
    ignore_eos: Literal[False] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    chat_template_kwargs: Annotated[dict[str, JsonValue], Field(max_length=0)] | None = None
    # Hints, ignored: the model has no such setting.
    reasoning_effort: AnyJson = None
    verbosity: AnyJson = None
    # The provider's bookkeeping, ignored: nothing that a model sees.
    user: AnyJson = None
    metadata: AnyJson = None
    store: AnyJson = None
    service_tier: AnyJson = None
    safety_identifier: AnyJson = None
    prompt_cache_key: AnyJson = None
    prompt_cache_retention: AnyJson = None
    prompt_cache_options: AnyJson = None
    cache_salt: AnyJson = None
    priority: AnyJson = None
    request_id: AnyJson = None
    session_id: AnyJson = None

    def to_model_request(self, graph: Graph) -> ModelRequest:
        tools = tuple([each.to_canonical() for each in self.tools])
        return ModelRequest(
            messages=tuple([to_canonical(m, index) for index, m in enumerate(self.messages)]),
            tools=tools,
            sampling=self.to_sampling(
                max_tokens=self.max_completion_tokens or self.max_tokens,
                stop=self.stop,
                seed=self.seed,
                top_logprobs=self.top_logprobs,
            ),
            n=self.n,
            stream=self.stream,
            parse_calls=bool(tools) and self.tool_choice != "none",
            parallel_calls=self.parallel_tool_calls,
            constraint=self._build_constraint(tools),
        )

    def _build_constraint(self, tools: Sequence[JsonValue]) -> Constraint | None:
        if not isinstance(self.tool_choice, str):
            return build_constraint(tools, tool_name=self.tool_choice.function.name)
        if self.response_format is None and self.tool_choice != "required":
            return None  # the common case
        schema: Schema | None = None
        if isinstance(self.response_format, ObjectFormat):
            schema = ANY_OBJECT
        elif isinstance(self.response_format, _SchemaFormat):
            schema = self.response_format.json_schema.definition or ANY_OBJECT
        return build_constraint(
            tools, choice=self.tool_choice, schema=schema, parallel=self.parallel_tool_calls
        )

    def build_reply(self, call: PreparedCall, template: ChatTemplate) -> Reply:
        return ChatReply(self, call, template)


# ------------------------------------------------------------------- replies


class ChatReply(Reply):
    """A chat completion, or its chunks."""

    def __init__(self, request: ChatRequest, call: PreparedCall, template: ChatTemplate) -> None:
        self._request = request
        self._call = call
        self._template = template
        self._head: Json = {
            "id": f"chatcmpl-{call.id}",
            "object": "chat.completion",
            "created": int(call.created),
            "model": request.model,
        }
        self._begun: set[int] = set()
        """Choices of which a delta was sent."""

    def build_body(self, completed: CompletedCall) -> Json:
        choices: list[JsonValue] = []
        for index, generation in enumerate(completed.call.generations):
            message, top = completed.messages[index], completed.tops[index]
            choice: Json = {
                "index": index,
                "message": _format_message(message),
                "finish_reason": _finish_reason(generation, message),
                "logprobs": self._format_logprobs(generation.tokens, generation.logprobs, top),
            }
            if self._request.return_token_ids:
                choice["token_ids"] = list(generation.tokens)
            choices.append(choice)
        reply: Json = {**self._head, "choices": choices, "usage": format_usage(completed.call)}
        if self._request.return_token_ids:
            reply["prompt_token_ids"] = list(self._call.tokens)
        return reply

    # ------------------------------------------------------------- streamed

    def build_first_events(self) -> bytes:
        if not self._request.return_token_ids:
            return b""
        choices: list[JsonValue] = [
            {"index": index, "delta": self._format_delta(index), "finish_reason": None}
            for index in range(self._call.request.n)
        ]
        return self._build_event(choices, prompt_token_ids=list(self._call.tokens))

    def build_chunk_events(self, index: int, chunk: TokenChunk, delta: Delta) -> bytes:
        if not any(delta) and not self._request.return_token_ids and not self._request.logprobs:
            return b""
        choice: Json = {
            "index": index,
            "delta": self._format_delta(index, delta),
            "logprobs": self._format_logprobs(chunk.tokens, chunk.logprobs, chunk.top),
            "finish_reason": None,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = list(chunk.tokens)
        return self._build_event([choice])

    def build_last_events(self, completed: CompletedCall, rest: Sequence[Delta]) -> bytes:
        events = b""
        for index, generation in enumerate(completed.call.generations):
            message = completed.messages[index]
            delta = self._format_delta(index, rest[index])
            if message.tool_calls:
                calls = _format_calls(message)
                delta["tool_calls"] = [{"index": i} | c for i, c in enumerate(calls)]
                events += self._build_event(
                    [{"index": index, "delta": delta, "finish_reason": None}]
                )
                delta = {}
            reason = _finish_reason(generation, message)
            # The last text comes with the finish reason, as from vLLM.
            events += self._build_event([{"index": index, "delta": delta, "finish_reason": reason}])
        if self._request.stream_options and self._request.stream_options.include_usage:
            events += self._build_event([], usage=format_usage(completed.call))
        return events + DONE

    def _build_event(self, choices: list[JsonValue], **more: JsonValue) -> bytes:
        chunk: Json = {"object": "chat.completion.chunk", "choices": choices}
        return format_event(self._head | chunk | more)

    def _format_delta(self, index: int, delta: Delta | None = None) -> Json:
        """Format the delta of a choice; the first one carries the role."""
        wire: Json = {}
        if index not in self._begun:
            self._begun.add(index)
            wire = {"role": "assistant", "content": ""}
        if delta is not None and delta.reasoning:
            wire |= _format_reasoning(delta.reasoning)
        if delta is not None and delta.content:
            wire["content"] = delta.content
        return wire

    def _format_logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float], tops: TopsByToken
    ) -> Json | None:
        if not self._request.logprobs:
            return None
        content = format_logprobs(self._template, tokens, logprobs, tops)
        return {"content": content, "refusal": None}


def _format_reasoning(text: str) -> Json:
    """Use both common names: vLLM writes `reasoning`, most agents read `reasoning_content`."""
    return {"reasoning": text, "reasoning_content": text}


def _format_message(message: Message) -> Json:
    wire: Json = {"role": "assistant", "content": message.content, "refusal": None}
    if message.reasoning:
        wire |= _format_reasoning(message.reasoning)
    if message.tool_calls:
        wire["content"] = message.content or None
        wire["tool_calls"] = [*_format_calls(message)]
    return wire


def _format_calls(message: Message) -> list[Json]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.tool_calls
    ]


def _finish_reason(generation: Generation, message: Message) -> str:
    return "tool_calls" if message.tool_calls else generation.stop


CHAT = Dialect("chat", "/chat/completions", partial(parse_body, ChatRequest), OPENAI_ERRORS)
