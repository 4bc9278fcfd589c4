"""OpenAI Responses: items, state kept by the server, and the same record as every other format."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from whet.errors import RequestError
from whet.gateway.calls import Ask, Prompt
from whet.gateway.constraint import ANY_OBJECT, Constraint, Schema, constraint
from whet.gateway.dialects.dialect import Asked, Dialect, Json, Reply, Told, validate
from whet.gateway.dialects.parts import (
    MOST_TOOLS,
    AnyJson,
    Count,
    Lenient,
    Sampled,
    Wire,
    openai_error,
    sse,
    tool,
)
from whet.gateway.dialects.responses_items import find_response, read_items
from whet.gateway.dialects.responses_reply import ResponsesReply
from whet.gateway.graph import Graph
from whet.gateway.messages import Message
from whet.gateway.template import ChatTemplate
from whet.types import CallId

LOGPROBS = "message.output_text.logprobs"


class _Tool(Lenient):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, AnyJson] | None = None

    def canonical(self, index: int) -> Json:
        if self.type != "function":
            raise RequestError(f"tools.{index}: tools of type {self.type!r} are not supported")
        if self.name is None:
            raise RequestError(f"tools.{index}.name: expected text")
        return tool(self.name, self.description, self.parameters, {})


class _NamedChoice(Wire):
    type: Literal["function"]
    name: str


class _TextFormat(Wire):
    type: Literal["text"]


class _ObjectFormat(Wire):
    type: Literal["json_object"]


class _SchemaFormat(Wire):
    type: Literal["json_schema"]
    name: str
    description: str | None = None
    definition: Annotated[dict[str, JsonValue] | None, Field(alias="schema")] = None
    strict: bool | None = None


class _Text(Wire):
    format: Annotated[
        _TextFormat | _ObjectFormat | _SchemaFormat | None, Field(discriminator="type")
    ] = None
    # A hint without a promise: the model has no such dial.
    verbosity: AnyJson = None


class _StreamOptions(Wire):
    include_obfuscation: AnyJson = None


class ResponsesRequest(Sampled):
    """What we honour. A field that is missing here, or a value outside its type, is a 400."""

    model: str
    input: str | list[JsonValue] = ""
    instructions: str = ""
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    stream_options: _StreamOptions | None = None
    tools: Annotated[tuple[_Tool, ...], Field(max_length=MOST_TOOLS, strict=False)] = ()
    tool_choice: Literal["auto", "none", "required"] | _NamedChoice = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: Count | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    text: _Text = _Text()
    metadata: dict[str, str] | None = None
    include: tuple[str, ...] = Field((), strict=False)
    """Only log-probabilities are something to include here; what else may be, we always show."""
    return_token_ids: bool = False
    # Taken only where they change nothing.
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    # Hints without a promise: the model has no such dial, and no built-in tools to count.
    reasoning: dict[str, JsonValue] | None = None
    max_tool_calls: AnyJson = None
    # Said for the provider's bookkeeping; they change nothing a model could see.
    user: AnyJson = None
    service_tier: AnyJson = None
    safety_identifier: AnyJson = None
    prompt_cache_key: AnyJson = None
    prompt_cache_retention: AnyJson = None
    prompt_cache_options: AnyJson = None

    def ask(self, graph: Graph) -> Ask:
        tools = tuple(each.canonical(index) for index, each in enumerate(self.tools))
        return Ask(
            messages=self._messages(graph),
            tools=tools,
            sampling=self.sampling(
                max_tokens=self.max_output_tokens, top_logprobs=self.top_logprobs
            ),
            stream=self.stream,
            calls_tools=bool(tools) and self.tool_choice != "none",
            several_calls=self.parallel_tool_calls,
            constraint=self._constraint(tools),
            shown=self._shown(graph),
        )

    def _messages(self, graph: Graph) -> tuple[Message, ...]:
        """The whole conversation: instructions, what came before, and what is new.

        The instructions of a previous response are not carried over, as the format says.
        """
        messages: list[Message] = []
        if self.instructions:
            messages.append(Message("system", self.instructions))
        if self.previous_response_id is not None:
            previous = find_response(graph, self.previous_response_id)
            instructed = bool(previous.origin.shown.get("instructions"))
            messages += graph.messages(previous.id)[instructed:]
        if isinstance(self.input, list):
            messages += read_items(self.input, graph)
        elif self.input:
            messages.append(Message("user", self.input))
        if not messages:
            raise RequestError("input: it is empty")
        return tuple(messages)

    def _constraint(self, tools: Sequence[JsonValue]) -> Constraint | None:
        schema: Schema | None = None
        if isinstance(self.text.format, _ObjectFormat):
            schema = ANY_OBJECT
        elif isinstance(self.text.format, _SchemaFormat):
            schema = self.text.format.definition or ANY_OBJECT
        if isinstance(self.tool_choice, _NamedChoice):
            return constraint(tools, named=self.tool_choice.name)
        return constraint(
            tools, choice=self.tool_choice, schema=schema, several=self.parallel_tool_calls
        )

    def _shown(self, graph: Graph) -> Json:
        """What the response says of its request, but for defaults and tools shown before."""
        shown: Json = self.model_dump(
            mode="json", include=SHOWN, exclude_defaults=True, exclude_none=True, by_alias=True
        )
        if self.tools:
            shown["tools"] = [_shown_tool(each) for each in self.tools]
            for call in reversed(graph.calls.values()):
                if call.origin.shown.get("tools") == shown["tools"]:
                    shown["tools"] = call.id
                    break
        return shown

    def reply(self, prompt: Prompt, template: ChatTemplate) -> Reply:
        shown = dict(prompt.origin.shown)
        shown["tools"] = [_shown_tool(each) for each in self.tools]
        return ResponsesReply(
            prompt,
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


def _shown_tool(each: _Tool) -> Json:
    return {
        "type": "function",
        "name": each.name,
        "description": each.description,
        "parameters": each.parameters,
        "strict": False,
    }


def shown_tools(graph: Graph, shown: Json) -> JsonValue:
    """The tools of a stored response, which may be those of an earlier one."""
    tools = shown.get("tools", [])
    if isinstance(tools, str):
        return graph.calls[CallId(tools)].origin.shown["tools"]
    return tools


class ResponsesDialect(Dialect):
    """`/v1/responses`."""

    name = "responses"
    path = "/responses"

    def parse(self, body: bytes) -> Asked:
        return validate(ResponsesRequest, body)

    def error(self, told: Told) -> Json:
        return openai_error(told)

    def error_event(self, told: Told) -> bytes:
        event: Json = {"type": "error", "code": told.code, "message": told.message, "param": None}
        return sse(event | {"sequence_number": 0}, "error")
