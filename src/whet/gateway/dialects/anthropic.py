"""Anthropic Messages: content blocks, tool use and thinking."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from whet.errors import RequestError
from whet.gateway.dialects.anthropic_reply import SIGNATURE, AnthropicReply
from whet.gateway.dialects.dialect import (
    Dialect,
    ErrorFormat,
    Json,
    Reply,
    ThreadUnsupported,
    WireError,
)
from whet.gateway.dialects.wire import (
    AnyJson,
    Count,
    Lenient,
    SamplingFields,
    StopStrings,
    Tools,
    Wire,
    build_tool,
    format_event,
    omit_tool,
    parse_body,
    read_text,
    read_type,
)
from whet.gateway.graph import Graph
from whet.gateway.messages import Message, ToolCall, dump_json
from whet.gateway.requests import ModelRequest, PreparedCall
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.constraint import Constraint, Schema, build_constraint

BILLING = "x-anthropic-billing-header"
"""Start of a line that Claude Code changes with every request, not meant for a model."""

CONTEXT_OVERFLOW = re.compile(r"maximum context length is (\d+) tokens.*?(\d+) tokens")
HOSTED_TOOLS = ("web_search_", "web_fetch_", "tool_search_")
"""Prefixes of tool types that clients send by default, of tools that Anthropic runs: such tools are
left out."""

ERROR_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class _AnthropicMessage(Lenient):
    role: Literal["user", "assistant", "system"]
    content: str | list[JsonValue]

    def to_canonical(self, where: str) -> list[Message]:
        if self.role == "system":
            return [Message("system", read_text(self.content, f"{where}.content", ("text",)))]
        blocks = _read_blocks(self.content, f"{where}.content")
        if self.role == "assistant":
            return [_convert_assistant(blocks)]
        return _convert_user(blocks)


class _Tool(Lenient):
    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, JsonValue] | None = None

    def to_canonical(self, index: int) -> Json | None:
        if self.type is not None and self.type.startswith(HOSTED_TOOLS):
            return omit_tool(self.type)
        if self.type not in (None, "custom"):
            raise RequestError(f"tools.{index}: tools of type {self.type!r} are not supported")
        if self.input_schema is None:
            raise RequestError(f"tools.{index}.input_schema: expected an object")
        return build_tool(self.name, self.description, self.input_schema, {})


class _ToolChoice(Wire):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class _Thinking(Wire):
    """Thinking is up to the model; a budget, which would truncate its turns, is ignored."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: AnyJson = None
    display: Literal["summarized", "omitted"] | None = None


class _Format(Wire):
    type: Literal["json_schema"]
    definition: Annotated[dict[str, JsonValue], Field(alias="schema")]


class _OutputConfig(Wire):
    format: _Format | None = None
    # A hint, ignored: the model has no such setting.
    effort: AnyJson = None


class _ContextEdit(Lenient):
    type: str


class _ContextManagement(Lenient):
    edits: Annotated[tuple[_ContextEdit, ...], Field(strict=False, fail_fast=True)] = ()

    def check(self) -> None:
        """Raise RequestError for edits of the prompt; thinking is dropped as the template does."""
        for index, edit in enumerate(self.edits):
            if not edit.type.startswith("clear_thinking_"):
                raise RequestError(
                    f"context_management.edits.{index}: edits of type {edit.type!r} are not "
                    "supported"
                )


class Conversation(Wire):
    """The fields of a request that is sampled or only counted."""

    model: str
    messages: Annotated[list[_AnthropicMessage], Field(min_length=1, fail_fast=True)]
    system: str | list[JsonValue] = ""
    tools: Tools[_Tool] = ()
    tool_choice: _ToolChoice = _ToolChoice(type="auto")
    thinking: _Thinking = _Thinking(type="adaptive")
    output_config: _OutputConfig = _OutputConfig()
    context_management: _ContextManagement = _ContextManagement()
    # The provider's bookkeeping, ignored: nothing that a model sees.
    cache_control: AnyJson = None
    speed: AnyJson = None

    def to_canonical_messages(self) -> tuple[Message, ...]:
        """Convert the messages to canonical form, the system prompt first."""
        self.context_management.check()
        messages: list[Message] = []
        if system := _read_system(self.system):
            messages.append(Message("system", system))
        for index, message in enumerate(self.messages):
            messages += message.to_canonical(f"messages.{index}")
        if messages[-1].role == "assistant":
            raise RequestError(
                "messages: the last message is of the assistant; continuing it (prefill) is not "
                "supported"
            )
        return tuple(messages)

    def to_canonical_tools(self) -> tuple[Json, ...]:
        """Convert the tools to the form that templates use."""
        tools = [each.to_canonical(index) for index, each in enumerate(self.tools)]
        return tuple(tool for tool in tools if tool is not None)


class CountRequest(Conversation):
    """`/v1/messages/count_tokens`."""

    def to_model_request(self) -> ModelRequest:
        """Convert to canonical form."""
        return ModelRequest(messages=self.to_canonical_messages(), tools=self.to_canonical_tools())


class AnthropicRequest(Conversation, SamplingFields):
    """The supported fields; any other field, or a value outside its type, is a 400."""

    max_tokens: Count
    stop_sequences: StopStrings | None = None
    stream: bool = False
    return_token_ids: bool = False
    thread: AnyJson = None
    # The provider's bookkeeping, ignored: nothing that a model sees.
    metadata: AnyJson = None
    service_tier: AnyJson = None
    inference_geo: AnyJson = None
    diagnostics: AnyJson = None
    user_profile_id: AnyJson = None
    workspace_id: AnyJson = None

    def to_model_request(self, graph: Graph) -> ModelRequest:
        if self.thread is not None:
            raise ThreadUnsupported("thread: send the whole conversation instead")
        tools = self.to_canonical_tools()
        return ModelRequest(
            messages=self.to_canonical_messages(),
            tools=tools,
            sampling=self.to_sampling(max_tokens=self.max_tokens, stop=self.stop_sequences),
            stream=self.stream,
            parse_calls=bool(tools) and self.tool_choice.type != "none",
            parallel_calls=not self.tool_choice.disable_parallel_tool_use,
            constraint=self._build_constraint(tools),
        )

    def _build_constraint(self, tools: Sequence[JsonValue]) -> Constraint | None:
        choice, several = self.tool_choice, not self.tool_choice.disable_parallel_tool_use
        if choice.type == "tool":
            return build_constraint(tools, tool_name=choice.name or "")
        if choice.type == "any":
            return build_constraint(tools, choice="required", parallel=several)
        wanted = self.output_config.format
        schema: Schema | None = wanted.definition if wanted else None
        return build_constraint(tools, choice=choice.type, schema=schema, parallel=several)

    def build_reply(self, call: PreparedCall, template: ChatTemplate) -> Reply:
        return AnthropicReply(
            call,
            template,
            model=self.model,
            thinking=self.thinking.type != "disabled",
            omit_thinking=self.thinking.display == "omitted",
            token_ids=self.return_token_ids,
        )


def _format_error(error: WireError) -> Json:
    message = error.message
    if overflow := CONTEXT_OVERFLOW.search(message):  # the words at which Claude Code compacts
        message = f"prompt is too long: {overflow[2]} tokens > {overflow[1]} maximum"
    wire: Json = {"type": ERROR_KINDS.get(error.status, "api_error"), "message": message}
    if error.code == "thread_unsupported_request":
        # The official client then sends the whole history.
        wire["details"] = {"error_code": error.code, "unsupported": ["thread"]}
    return {"type": "error", "error": wire}


def _format_error_event(error: WireError) -> bytes:
    return format_event(_format_error(error), "error")


ANTHROPIC = Dialect(
    "messages",
    "/messages",
    partial(parse_body, AnthropicRequest),
    ErrorFormat(_format_error, _format_error_event),
)


def _read_system(system: str | list[JsonValue]) -> str:
    lines = read_text(system, "system", ("text",)).split("\n")
    return "\n".join(line for line in lines if not line.startswith(BILLING))


class _Block(Lenient):
    """A content block; its fields depend on its type."""

    type: str
    where: str
    text: str | None = None
    thinking: str | None = None
    signature: str = ""
    id: str | None = None
    name: str | None = None
    input: dict[str, JsonValue] | None = None
    tool_use_id: str | None = None
    content: AnyJson = None
    is_error: bool | None = None

    def require_field(self, name: Literal["text", "thinking", "id", "name", "tool_use_id"]) -> str:
        value: str | None = getattr(self, name)
        if value is None:
            raise RequestError(f"{self.where}.{name}: expected text")
        return value

    def build_unsupported_error(self, role: str) -> RequestError:
        return RequestError(
            f"{self.where}: blocks of type {self.type!r} are not supported in a message of "
            f"the {role}"
        )


def _read_blocks(content: str | list[JsonValue], where: str) -> list[_Block]:
    if isinstance(content, str):
        return [_Block(type="text", where=where, text=content)]
    blocks: list[_Block] = []
    for index, block in enumerate(content):
        path = f"{where}.{index}"
        read_type(block, path)
        assert isinstance(block, dict)
        blocks.append(_parse_block(block, path))
    return blocks


def _parse_block(block: Json, where: str) -> _Block:
    known = {name: value for name, value in block.items() if value is not None}
    try:
        return _Block.model_validate(known | {"where": where})
    except ValueError as error:
        raise RequestError(f"{where}: invalid content block of type {block['type']!r}") from error


def _convert_assistant(blocks: Sequence[_Block]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    call = ""
    for block in blocks:
        match block.type:
            case "text":
                texts.append(block.require_field("text"))
            case "thinking":
                thoughts.append(block.require_field("thinking"))
                call = block.signature.removeprefix(SIGNATURE)
            case "redacted_thinking":
                pass  # never ours, and encrypted
            case "tool_use":
                arguments = dump_json(block.input or {}).decode()
                calls.append(
                    ToolCall(block.require_field("id"), block.require_field("name"), arguments)
                )
            case _:
                raise block.build_unsupported_error("assistant")
    return Message(
        "assistant", "\n".join(texts), tuple(calls), reasoning="\n".join(thoughts), call=call
    )


def _convert_user(blocks: Sequence[_Block]) -> list[Message]:
    """Convert tool results to messages of their own, and the texts between them to the user's."""
    messages: list[Message] = []
    texts: list[str] = []
    for block in blocks:
        match block.type:
            case "text":
                texts.append(block.require_field("text"))
            case "tool_result":
                if texts:
                    messages.append(Message("user", "\n".join(texts)))
                    texts = []
                where = f"{block.where}.content"
                result = read_text(block.content, where, ("text",), images=("image",))
                # Templates have no flag for failed results, so the text reports the failure.
                result = f"Error: {result}" if block.is_error else result
                id = block.require_field("tool_use_id")
                messages.append(Message("tool", result, tool_call_id=id))
            case _:
                raise block.build_unsupported_error("user")
    if texts or not messages:
        messages.append(Message("user", "\n".join(texts)))
    return messages
