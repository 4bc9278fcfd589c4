"""OpenAI Responses: items, and state kept by the server."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

from pydantic import Field, JsonValue
from starlette.datastructures import QueryParams

from whet.errors import RequestError
from whet.gateway.dialects.chat import NamedSchema, ObjectFormat, TextFormat
from whet.gateway.dialects.dialect import Dialect, ErrorFormat, Json, Reply, WireError
from whet.gateway.dialects.responses_items import (
    build_input_items,
    build_output_items,
    find_response,
    read_items,
)
from whet.gateway.dialects.responses_reply import ResponsesReply, build_response, finish_response
from whet.gateway.dialects.wire import (
    AnyJson,
    Count,
    Lenient,
    SamplingFields,
    Tools,
    Wire,
    build_tool,
    format_error,
    format_event,
    omit_tool,
    parse_body,
)
from whet.gateway.graph import Graph
from whet.gateway.messages import Message
from whet.gateway.requests import ModelRequest, PreparedCall
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.constraint import ANY_OBJECT, Constraint, Schema, build_constraint
from whet.types import CallId

HOSTED_TOOLS = ("web_search", "image_generation", "namespace")
"""Prefixes of tool types that clients send by default, of tools that OpenAI hosts and of groups of
tools: such tools are left out."""
LOGPROBS = "message.output_text.logprobs"


class _Tool(Lenient):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, AnyJson] | None = None

    def to_canonical(self, index: int) -> Json | None:
        if self.type.startswith(HOSTED_TOOLS):
            return omit_tool(self.type)
        if self.type != "function":
            raise RequestError(f"tools.{index}: tools of type {self.type!r} are not supported")
        if self.name is None:
            raise RequestError(f"tools.{index}.name: expected text")
        return build_tool(self.name, self.description, self.parameters, {})


class _NamedChoice(Wire):
    type: Literal["function"]
    name: str


class _SchemaFormat(NamedSchema):
    type: Literal["json_schema"]


class _Text(Wire):
    format: Annotated[
        TextFormat | ObjectFormat | _SchemaFormat | None, Field(discriminator="type")
    ] = None
    # A hint, ignored: the model has no such setting.
    verbosity: AnyJson = None


class _StreamOptions(Wire):
    include_obfuscation: AnyJson = None


class ResponsesRequest(SamplingFields):
    """The supported fields; any other field, or a value outside its type, is a 400."""

    model: str
    input: str | list[JsonValue] = ""
    instructions: str = ""
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    stream_options: _StreamOptions | None = None
    tools: Tools[_Tool] = ()
    tool_choice: Literal["auto", "none", "required"] | _NamedChoice = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: Count | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    text: _Text = _Text()
    metadata: dict[str, str] | None = None
    include: Annotated[tuple[str, ...], Field(strict=False, fail_fast=True)] = ()
    """Only log-probabilities need to be requested; everything else is always included."""
    return_token_ids: bool = False
    # Accepted only with values that change nothing.
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    # Hints, ignored: the model has no such setting, and no built-in tools.
    reasoning: dict[str, JsonValue] | None = None
    max_tool_calls: AnyJson = None
    # The provider's bookkeeping, ignored: nothing that a model sees.
    user: AnyJson = None
    client_metadata: AnyJson = None
    service_tier: AnyJson = None
    safety_identifier: AnyJson = None
    prompt_cache_key: AnyJson = None
    prompt_cache_retention: AnyJson = None
    prompt_cache_options: AnyJson = None

    def to_model_request(self, graph: Graph) -> ModelRequest:
        converted = [each.to_canonical(index) for index, each in enumerate(self.tools)]
        tools = tuple(tool for tool in converted if tool is not None)
        return ModelRequest(
            messages=self._collect_messages(graph),
            tools=tools,
            sampling=self.to_sampling(
                max_tokens=self.max_output_tokens, top_logprobs=self.top_logprobs
            ),
            stream=self.stream,
            parse_calls=bool(tools) and self.tool_choice != "none",
            parallel_calls=self.parallel_tool_calls,
            constraint=self._build_constraint(tools),
            shown=self._collect_shown_fields(graph),
        )

    def _collect_messages(self, graph: Graph) -> tuple[Message, ...]:
        """Return the whole conversation: instructions, earlier turns, and the new input.

        As the format demands, the instructions of a previous response are not carried over.
        """
        messages: list[Message] = []
        if self.instructions:
            messages.append(Message("system", self.instructions))
        if self.previous_response_id is not None:
            previous = find_response(graph, self.previous_response_id)
            instructed = bool(previous.origin.shown.get("instructions"))
            *earlier, turn = graph.collect_messages(previous)
            messages += [*earlier, turn._replace(call=previous.id)][instructed:]
        if isinstance(self.input, list):
            messages += read_items(self.input, graph)
        elif self.input:
            messages.append(Message("user", self.input))
        if not messages:
            raise RequestError("input: expected at least one item or a text, found none")
        return tuple(messages)

    def _build_constraint(self, tools: Sequence[JsonValue]) -> Constraint | None:
        schema: Schema | None = None
        if isinstance(self.text.format, ObjectFormat):
            schema = ANY_OBJECT
        elif isinstance(self.text.format, _SchemaFormat):
            schema = self.text.format.definition or ANY_OBJECT
        if isinstance(self.tool_choice, _NamedChoice):
            return build_constraint(tools, tool_name=self.tool_choice.name)
        return build_constraint(
            tools, choice=self.tool_choice, schema=schema, parallel=self.parallel_tool_calls
        )

    def _collect_shown_fields(self, graph: Graph) -> Json:
        """Return the request fields that the response shows, but defaults and repeated tools."""
        shown: Json = self.model_dump(
            mode="json", include=SHOWN, exclude_defaults=True, exclude_none=True, by_alias=True
        )
        if self.tools:
            shown["tools"] = self._format_tools()
            for call in reversed(graph.calls.values()):
                if call.origin.shown.get("tools") == shown["tools"]:
                    shown["tools"] = call.id
                    break
        return shown

    def _format_tools(self) -> list[JsonValue]:
        return [_format_tool(each) for each in self.tools if each.type == "function"]

    def build_reply(self, call: PreparedCall, template: ChatTemplate) -> Reply:
        shown = dict(call.origin.shown)
        shown["tools"] = self._format_tools()
        return ResponsesReply(
            call,
            template,
            shown=shown,
            logprobs=LOGPROBS in self.include or self.top_logprobs > 0,
            token_ids=self.return_token_ids,
        )


SHOWN = {
    "instructions",
    "previous_response_id",
    "store",
    "tool_choice",
    "parallel_tool_calls",
    "max_output_tokens",
    "top_logprobs",
    "text",
    "metadata",
    "reasoning",
    "user",
    "temperature",
    "top_p",
}


def _format_tool(each: _Tool) -> Json:
    return {
        "type": "function",
        "name": each.name,
        "description": each.description,
        "parameters": each.parameters,
        "strict": False,
    }


def _resolve_tools(graph: Graph, shown: Json) -> JsonValue:
    """Return the tools of a stored response, which may refer to those of an earlier one."""
    tools = shown.get("tools", [])
    if isinstance(tools, str):
        return graph.calls[CallId(tools)].origin.shown["tools"]
    return tools


def show_response(graph: Graph, id: str, query: QueryParams, template: ChatTemplate) -> Json:
    """Return a stored response, without log-probabilities. Raises NotFound."""
    call = find_response(graph, id)
    if query.get("stream", "false") != "false":
        raise RequestError("the field 'stream' is not supported: a stored response is not streamed")
    shown = dict(call.origin.shown)
    shown["tools"] = _resolve_tools(graph, shown)
    [generation] = call.generations
    message = Message.from_json(generation.message)
    output = build_output_items(call.id, message, complete=generation.stop == "stop")
    response = build_response(call.id, call.created, call.origin.model, shown)
    return finish_response(response, call, message, template, output)


def list_input(graph: Graph, id: str, query: QueryParams) -> Json:
    """Return the input items of a response in one page, newest first unless `order` is `asc`."""
    call = find_response(graph, id)
    messages = graph.collect_messages(call)[bool(call.origin.shown.get("instructions")) : -1]
    items = build_input_items(call.id, messages)
    if query.get("order", "desc") == "desc":
        items.reverse()
    data: list[JsonValue] = [*items]
    ids = [str(item["id"]) for item in items] or [""]
    return {
        "object": "list",
        "data": data,
        "first_id": ids[0],
        "last_id": ids[-1],
        "has_more": False,
    }


def _format_error_event(error: WireError) -> bytes:
    event: Json = {"type": "error", "code": error.code, "message": error.message, "param": None}
    return format_event(event | {"sequence_number": 0}, "error")


RESPONSES = Dialect(
    "responses",
    "/responses",
    partial(parse_body, ResponsesRequest),
    ErrorFormat(format_error, _format_error_event),
)
