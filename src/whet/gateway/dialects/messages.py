"""Anthropic Messages: content blocks, tool use and thinking."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from whet.errors import RequestError
from whet.gateway import strictjson
from whet.gateway.calls import Ask, Prompt
from whet.gateway.constraint import Constraint, Schema, constraint
from whet.gateway.dialects.dialect import (
    Asked,
    Dialect,
    Json,
    Reply,
    ThreadUnsupported,
    Told,
    validate,
)
from whet.gateway.dialects.messages_reply import MessagesReply
from whet.gateway.dialects.parts import (
    MOST_TOOLS,
    AnyJson,
    Count,
    Lenient,
    Sampled,
    Stops,
    Wire,
    kind_of,
    sse,
    text_of,
    tool,
)
from whet.gateway.graph import Graph
from whet.gateway.messages import Message, ToolCall
from whet.gateway.template import ChatTemplate

BILLING = "x-anthropic-billing-header"
"""Begins a system block that Claude Code writes anew for every request; no model is meant."""

ERROR_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class _Said(Lenient):
    role: Literal["user", "assistant", "system"]
    content: str | list[JsonValue]

    def canonical(self, where: str) -> list[Message]:
        if self.role == "system":
            return [Message("system", text_of(self.content, f"{where}.content", ("text",)))]
        blocks = _blocks(self.content, f"{where}.content")
        if self.role == "assistant":
            return [_assistant(blocks)]
        return _user(blocks)


class _Tool(Lenient):
    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, JsonValue] | None = None

    def canonical(self, index: int) -> Json:
        if self.type not in (None, "custom"):
            raise RequestError(f"tools.{index}: tools of type {self.type!r} are not supported")
        if self.input_schema is None:
            raise RequestError(f"tools.{index}.input_schema: expected an object")
        return tool(self.name, self.description, self.input_schema, {})


class _ToolChoice(Wire):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class _Thinking(Wire):
    """Whether to think is the model's own; a budget would cut its turns, and is not kept to."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: AnyJson = None
    display: Literal["summarized", "omitted"] | None = None


class _Format(Wire):
    type: Literal["json_schema"]
    definition: Annotated[dict[str, JsonValue], Field(alias="schema")]


class _OutputConfig(Wire):
    format: _Format | None = None
    # A hint without a promise: the model has no such dial.
    effort: AnyJson = None


class Conversation(Wire):
    """What a request says to the model, sampled or only counted."""

    model: str
    messages: Annotated[list[_Said], Field(min_length=1)]
    system: str | list[JsonValue] = ""
    tools: Annotated[tuple[_Tool, ...], Field(max_length=MOST_TOOLS, strict=False)] = ()
    tool_choice: _ToolChoice = _ToolChoice(type="auto")
    thinking: _Thinking = _Thinking(type="adaptive")
    output_config: _OutputConfig = _OutputConfig()
    # Said for the provider's bookkeeping; they change nothing a model could see.
    cache_control: AnyJson = None
    speed: AnyJson = None

    def canonical_messages(self) -> tuple[Message, ...]:
        """In canonical form, the system prompt first."""
        messages: list[Message] = []
        if system := _system(self.system):
            messages.append(Message("system", system))
        for index, said in enumerate(self.messages):
            messages += said.canonical(f"messages.{index}")
        if messages[-1].role == "assistant":
            raise RequestError(
                "messages: the last one is of the assistant; to continue a turn that was begun "
                "for it (prefill) is not supported"
            )
        return tuple(messages)

    def canonical_tools(self) -> tuple[Json, ...]:
        """As templates see them."""
        return tuple(each.canonical(index) for index, each in enumerate(self.tools))


class CountRequest(Conversation):
    """`/v1/messages/count_tokens`."""

    def ask(self) -> Ask:
        """What would be sampled from."""
        return Ask(messages=self.canonical_messages(), tools=self.canonical_tools())


class MessagesRequest(Conversation, Sampled):
    """What we honour. A field that is missing here, or a value outside its type, is a 400."""

    max_tokens: Count
    stop_sequences: Stops | None = None
    stream: bool = False
    return_token_ids: bool = False
    thread: AnyJson = None
    # Said for the provider's bookkeeping; they change nothing a model could see.
    metadata: AnyJson = None
    service_tier: AnyJson = None
    inference_geo: AnyJson = None
    diagnostics: AnyJson = None
    user_profile_id: AnyJson = None
    workspace_id: AnyJson = None

    def ask(self, graph: Graph) -> Ask:
        if self.thread is not None:
            raise ThreadUnsupported("thread: send the whole conversation instead")
        tools = self.canonical_tools()
        return Ask(
            messages=self.canonical_messages(),
            tools=tools,
            sampling=self.sampling(max_tokens=self.max_tokens, stop=self.stop_sequences),
            stream=self.stream,
            calls_tools=bool(tools) and self.tool_choice.type != "none",
            several_calls=not self.tool_choice.disable_parallel_tool_use,
            constraint=self._constraint(tools),
        )

    def _constraint(self, tools: Sequence[JsonValue]) -> Constraint | None:
        choice, several = self.tool_choice, not self.tool_choice.disable_parallel_tool_use
        if choice.type == "tool":
            return constraint(tools, named=choice.name or "")
        if choice.type == "any":
            return constraint(tools, choice="required", several=several)
        wanted = self.output_config.format
        schema: Schema | None = wanted.definition if wanted else None
        return constraint(tools, choice=choice.type, schema=schema, several=several)

    def reply(self, prompt: Prompt, template: ChatTemplate) -> Reply:
        return MessagesReply(
            prompt,
            template,
            model=self.model,
            thinking=self.thinking.type != "disabled",
            omit_thinking=self.thinking.display == "omitted",
            token_ids=self.return_token_ids,
        )


class MessagesDialect(Dialect):
    """`/v1/messages`."""

    name = "messages"
    path = "/messages"

    def parse(self, body: bytes) -> Asked:
        return validate(MessagesRequest, body)

    def error(self, told: Told) -> Json:
        error: Json = {
            "type": ERROR_KINDS.get(told.status, "api_error"),
            "message": told.message,
        }
        if told.code == "thread_unsupported_request":
            # The official client then falls back to sending the whole history.
            error["details"] = {"error_code": told.code, "unsupported": ["thread"]}
        return {"type": "error", "error": error}

    def error_event(self, told: Told) -> bytes:
        return sse(self.error(told), "error")


def _system(system: str | list[JsonValue]) -> str:
    if isinstance(system, str):
        return "" if system.startswith(BILLING) else system
    meant = [block for block in system if not _is_billing(block)]
    return text_of(meant, "system", ("text",))


def _is_billing(block: JsonValue) -> bool:
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith(BILLING)


class _Block(Lenient):
    """A content block; which fields it has depends on its type."""

    type: str
    where: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, JsonValue] | None = None
    tool_use_id: str | None = None
    content: AnyJson = None
    is_error: bool | None = None

    def need(self, name: Literal["text", "thinking", "id", "name", "tool_use_id"]) -> str:
        values = {
            "text": self.text,
            "thinking": self.thinking,
            "id": self.id,
            "name": self.name,
            "tool_use_id": self.tool_use_id,
        }
        value = values[name]
        if value is None:
            raise RequestError(f"{self.where}.{name}: expected text")
        return value

    def unsupported(self, role: str) -> RequestError:
        return RequestError(
            f"{self.where}: blocks of type {self.type!r} are not supported in a message of "
            f"the {role}"
        )


def _blocks(content: str | list[JsonValue], where: str) -> list[_Block]:
    if isinstance(content, str):
        return [_Block(type="text", where=where, text=content)]
    blocks: list[_Block] = []
    for index, block in enumerate(content):
        here = f"{where}.{index}"
        kind_of(block, here)
        assert isinstance(block, dict)
        blocks.append(_parse_block(block, here))
    return blocks


def _parse_block(block: Json, where: str) -> _Block:
    known = {name: value for name, value in block.items() if value is not None}
    try:
        return _Block.model_validate(known | {"where": where})
    except ValueError as error:
        raise RequestError(f"{where}: not a content block of type {block['type']!r}") from error


def _assistant(blocks: Sequence[_Block]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in blocks:
        match block.type:
            case "text":
                texts.append(block.need("text"))
            case "thinking":
                thoughts.append(block.need("thinking"))
            case "redacted_thinking":
                pass  # never ours, so it holds nothing we could read
            case "tool_use":
                arguments = strictjson.dumps(block.input or {}).decode()
                calls.append(ToolCall(block.need("id"), block.need("name"), arguments))
            case _:
                raise block.unsupported("assistant")
    return Message("assistant", "\n".join(texts), tuple(calls), reasoning="\n".join(thoughts))


def _user(blocks: Sequence[_Block]) -> list[Message]:
    """Tool results are messages of their own; the texts between them are the user's."""
    messages: list[Message] = []
    texts: list[str] = []
    for block in blocks:
        match block.type:
            case "text":
                texts.append(block.need("text"))
            case "tool_result":
                if texts:
                    messages.append(Message("user", "\n".join(texts)))
                    texts = []
                result = text_of(block.content, f"{block.where}.content", ("text",))
                # Templates know no failed results, so the text says it.
                result = f"Error: {result}" if block.is_error else result
                id = block.need("tool_use_id")
                messages.append(Message("tool", result, tool_call_id=id))
            case _:
                raise block.unsupported("user")
    if texts or not messages:
        messages.append(Message("user", "\n".join(texts)))
    return messages
