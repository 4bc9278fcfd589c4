"""OpenAI Chat Completions, with vLLM's `return_token_ids`."""

import json
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter

from whet.gateway.constraint import ANY_OBJECT, Constraint, Schema, constraint
from whet.gateway.dialects.chat_reply import ChatReply
from whet.gateway.dialects.dialect import Asked, Dialect, Json, Reply, Told, validate
from whet.gateway.graph import Graph
from whet.gateway.messages import Message, Role, ToolCall
from whet.gateway.service import Ask, Prompt
from whet.gateway.template import ChatTemplate
from whet.types import Sampling

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class _Lenient(BaseModel):
    """Part of a message: SDKs echo fields of their own, which mean nothing to a model."""

    model_config = ConfigDict(extra="ignore")


class _Text(_Lenient):
    type: Literal["text"]
    text: str


class _Function(_Lenient):
    name: str
    arguments: str


class _ToolCall(_Lenient):
    id: str
    type: Literal["function"] = "function"
    function: _Function


class _Message(_Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Text] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None

    def canonical(self) -> Message:
        parts = self.content if isinstance(self.content, list) else []
        text = self.content if isinstance(self.content, str) else "".join(p.text for p in parts)
        calls = self.tool_calls or []
        return Message(
            ROLES[self.role],
            text,
            tuple(ToolCall(c.id, c.function.name, c.function.arguments) for c in calls),
            self.tool_call_id or "",
        )


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool = False


class _TextFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]


class _ObjectFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["json_object"]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    description: str | None = None
    definition: Annotated[dict[str, JsonValue] | None, Field(alias="schema")] = None
    strict: bool | None = None


class _SchemaFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["json_schema"]
    json_schema: _Schema


class _Named(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str


class _NamedChoice(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["function"]
    function: _Named


class _Tool(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: dict[str, JsonValue]


class ChatRequest(BaseModel):
    """What we honour. A field that is missing here, or a value outside its type, is a 400."""

    model_config = ConfigDict(extra="forbid")

    model: str
    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _NamedChoice | None = None
    parallel_tool_calls: Literal[True] | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    response_format: Annotated[
        _TextFormat | _ObjectFormat | _SchemaFormat | None, Field(discriminator="type")
    ] = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    # Said for the provider's bookkeeping; they change nothing a model could see.
    user: str | None = None
    metadata: dict[str, JsonValue] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def ask(self, graph: Graph) -> Ask:
        tools = tuple(tool.model_dump() for tool in self.tools or [])
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Ask(
            messages=tuple(message.canonical() for message in self.messages),
            tools=tools,
            sampling=Sampling(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=self.top_p or 1.0,
                top_k=max(0, self.top_k or 0),
                max_tokens=self.max_completion_tokens or self.max_tokens,
                stop=tuple(stop for stop in stops if stop),
                seed=self.seed,
                top_logprobs=self.top_logprobs or 0,
            ),
            n=self.n or 1,
            stream=bool(self.stream),
            calls_tools=bool(tools) and self.tool_choice != "none",
            constraint=self._constraint(tools),
        )

    def _constraint(self, tools: Sequence[JsonValue]) -> Constraint | None:
        schema: Schema | None = None
        if isinstance(self.response_format, _ObjectFormat):
            schema = ANY_OBJECT
        elif isinstance(self.response_format, _SchemaFormat):
            schema = self.response_format.json_schema.definition or ANY_OBJECT
        if isinstance(self.tool_choice, _NamedChoice):
            return constraint(tools, named=self.tool_choice.function.name)
        return constraint(tools, choice=self.tool_choice or "auto", schema=schema)

    def reply(self, prompt: Prompt, template: ChatTemplate) -> Reply:
        return ChatReply(
            prompt,
            template,
            model=self.model,
            logprobs=bool(self.logprobs),
            token_ids=bool(self.return_token_ids),
            usage=bool(self.stream_options and self.stream_options.include_usage),
        )


_REQUEST = TypeAdapter(ChatRequest)


class ChatDialect(Dialect):
    """`/v1/chat/completions`."""

    name = "chat"
    path = "/chat/completions"

    def parse(self, body: bytes) -> Asked:
        return validate(_REQUEST, body)

    def error(self, told: Told) -> Json:
        return openai_error(told)

    def error_event(self, told: Told) -> bytes:
        return b"data: " + json.dumps(openai_error(told)).encode() + b"\n\n"


def openai_error(told: Told) -> Json:
    """An error as OpenAI's APIs tell it."""
    kind = "invalid_request_error" if told.status < 500 else "server_error"
    error: Json = {"message": told.message, "type": kind, "param": None, "code": told.code}
    return {"error": error}
