"""OpenAI Chat Completions, with the fields vLLM adds."""

from collections.abc import Sequence
from typing import Annotated, Literal, Required

from pydantic import ConfigDict, Field, JsonValue, with_config
from typing_extensions import TypedDict

from whet.gateway.calls import Ask, Prompt
from whet.gateway.constraint import ANY_OBJECT, Constraint, Schema, constraint
from whet.gateway.dialects.chat_reply import ChatReply
from whet.gateway.dialects.dialect import Asked, Dialect, Json, Reply, Told, validate
from whet.gateway.dialects.parts import (
    MOST_TOOLS,
    AnyJson,
    Count,
    Lenient,
    Off,
    One,
    Sampled,
    Stops,
    Wire,
    openai_error,
    sse,
    text_of,
    tool,
)
from whet.gateway.graph import Graph
from whet.gateway.messages import Message, Role, ToolCall
from whet.gateway.template import ChatTemplate

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
    """A message as Chat Completions writes it.

    A dictionary, since each request brings all messages before it again: a model for each of them
    would take half as long again.
    """

    role: Required[Literal["system", "developer", "user", "assistant", "tool"]]
    content: AnyJson
    tool_calls: list[_ToolCall] | None
    tool_call_id: str | None
    reasoning: AnyJson
    reasoning_content: AnyJson


def canonical(message: ChatMessage, index: int) -> Message:
    """A message in canonical form. Raises RequestError that names the part we cannot take."""
    role, content = ROLES[message["role"]], message.get("content")
    if isinstance(content, str) and len(message) == 2:  # as most are
        return Message(role, content)
    if not isinstance(content, str):
        kinds = ("text", "refusal") if role == "assistant" else ("text",)
        content = text_of(content, f"messages.{index}.content", kinds)
    calls = message.get("tool_calls") or ()
    thought = message.get("reasoning") or message.get("reasoning_content")
    return Message(
        role,
        content,
        tuple([ToolCall(c.id, c.function.name, c.function.arguments) for c in calls]),
        message.get("tool_call_id") or "",
        thought if isinstance(thought, str) and role == "assistant" else "",
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
    """A tool as Chat Completions writes it."""

    type: Literal["function"]
    function: _ToolFunction

    def canonical(self) -> Json:
        """As templates see it."""
        function = self.function
        return tool(function.name, function.description, function.parameters, function.more)


class StreamOptions(Wire):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    include_obfuscation: AnyJson = None


class _TextFormat(Wire):
    type: Literal["text"]


class _ObjectFormat(Wire):
    type: Literal["json_object"]


class _Schema(Wire):
    name: str
    description: str | None = None
    definition: Annotated[dict[str, JsonValue] | None, Field(alias="schema")] = None
    strict: bool | None = None


class _SchemaFormat(Wire):
    type: Literal["json_schema"]
    json_schema: _Schema


class _Named(Wire):
    name: str


class _NamedChoice(Wire):
    type: Literal["function"]
    function: _Named


class ChatRequest(Sampled):
    """What we honour. A field that is missing here, or a value outside its type, is a 400."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: Annotated[tuple[ChatTool, ...], Field(max_length=MOST_TOOLS, strict=False)] = ()
    tool_choice: Literal["auto", "none", "required"] | _NamedChoice = "auto"
    parallel_tool_calls: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: str | Stops | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    return_token_ids: bool = False
    response_format: Annotated[
        _TextFormat | _ObjectFormat | _SchemaFormat | None, Field(discriminator="type")
    ] = None
    # Taken only where they change nothing.
    frequency_penalty: Off | None = None
    presence_penalty: Off | None = None
    min_p: Off | None = None
    repetition_penalty: One | None = None
    logit_bias: Annotated[dict[str, JsonValue], Field(max_length=0)] | None = None
    modalities: list[Literal["text"]] | None = None
    include_reasoning: Literal[True] | None = None
    skip_special_tokens: Literal[True] | None = None
    ignore_eos: Literal[False] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    chat_template_kwargs: Annotated[dict[str, JsonValue], Field(max_length=0)] | None = None
    # Hints without a promise: the model has no such dial.
    reasoning_effort: AnyJson = None
    verbosity: AnyJson = None
    # Said for the provider's bookkeeping; they change nothing a model could see.
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

    def ask(self, graph: Graph) -> Ask:
        tools = tuple([each.canonical() for each in self.tools])
        return Ask(
            messages=tuple([canonical(m, index) for index, m in enumerate(self.messages)]),
            tools=tools,
            sampling=self.sampling(
                max_tokens=self.max_completion_tokens or self.max_tokens,
                stop=self.stop,
                seed=self.seed,
                top_logprobs=self.top_logprobs,
            ),
            n=self.n,
            stream=self.stream,
            calls_tools=bool(tools) and self.tool_choice != "none",
            several_calls=self.parallel_tool_calls,
            constraint=self._constraint(tools),
        )

    def _constraint(self, tools: Sequence[JsonValue]) -> Constraint | None:
        if not isinstance(self.tool_choice, str):
            return constraint(tools, named=self.tool_choice.function.name)
        schema: Schema | None = None
        match self.response_format:
            case None:  # most have none, and to tell the others apart takes its time
                pass
            case _ObjectFormat():
                schema = ANY_OBJECT
            case _SchemaFormat():
                schema = self.response_format.json_schema.definition or ANY_OBJECT
            case _TextFormat():
                pass
        return constraint(
            tools, choice=self.tool_choice, schema=schema, several=self.parallel_tool_calls
        )

    def reply(self, prompt: Prompt, template: ChatTemplate) -> Reply:
        return ChatReply(
            prompt,
            template,
            model=self.model,
            logprobs=self.logprobs,
            token_ids=self.return_token_ids,
            usage=bool(self.stream_options and self.stream_options.include_usage),
        )


class ChatDialect(Dialect):
    """`/v1/chat/completions`."""

    name = "chat"
    path = "/chat/completions"

    def parse(self, body: bytes) -> Asked:
        return validate(ChatRequest, body)

    def error(self, told: Told) -> Json:
        return openai_error(told)

    def error_event(self, told: Told) -> bytes:
        return sse(openai_error(told))
