"""Answers that are held to a schema or to a tool, from the wire to the rows."""

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import pytest
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel, ConfigDict, Field

from support.gateway.scripted_gateway import CALLING, CHAT_TOOL, MODEL, TINY, Gateway, NewGateway
from support.models.real_templates import template_of, trl_templates
from whet.config import LocalEngineConfig, LocalTrainerConfig
from whet.engines.local.engine import LocalEngine
from whet.engines.local.grammar import Grammars
from whet.errors import RequestError
from whet.gateway.templates.constraint import Constraint, build_constraint
from whet.gateway.templates.output_format import OutputFormat, detect_output_format
from whet.gateway.templates.renderer import Renderer
from whet.models.huggingface import LocalPolicy
from whet.training.rows import build_rows
from whet.types import Credit, Trajectory

pytestmark = pytest.mark.anyio


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")
    sky: Literal["clear", "cloudy"]
    degrees: Annotated[int, Field(ge=-9, le=39)]
    winds: Annotated[list[Literal["north", "south"]], Field(max_length=2)]


def tool(name: str, parameters: dict[str, Any] | None) -> Any:
    function: dict[str, Any] = {"name": name, "strict": True}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
ADD = tool(
    "add",
    {
        "type": "object",
        "properties": {"a": DIGIT, "b": DIGIT},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
)
NOW = tool("now", None)
QUESTION: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture(scope="module")
def policy() -> LocalPolicy:
    return LocalPolicy(TINY, LocalTrainerConfig(weights="full"), device="cpu", seed=0)


@pytest.fixture
async def served(new_gateway: NewGateway, policy: LocalPolicy) -> AsyncGenerator[Gateway]:
    """A gateway with the tiny model behind it."""
    gateway = await new_gateway()
    template, stop_ids = gateway.renderer.template, gateway.renderer.stop_ids
    engine = LocalEngine(
        policy, LocalEngineConfig(), template.decode, grammars=Grammars(TINY, stop_ids), threads=1
    )
    gateway.engine = engine  # type: ignore[assignment]
    gateway.restart()
    yield gateway
    await engine.close()


@pytest.fixture
def client(served: Gateway) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url="http://gateway/v1",
        api_key=served.key,
        http_client=cast(Any, served.client),  # Any: its own type is of httpx2, which is alike
        max_retries=0,
    )


# ------------------------------------------------------------------------- answers in JSON


@pytest.mark.parametrize("temperature", [0, 1, 2])
async def test_the_clients_parse_gets_the_model_it_asked_for(
    client: AsyncOpenAI, served: Gateway, temperature: int
) -> None:
    reply = await client.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=Weather, temperature=temperature
    )
    assert isinstance(reply.choices[0].message.parsed, Weather)
    assert reply.choices[0].finish_reason == "stop"
    [call] = await served.calls()
    assert call.generations[0].sampling.grammar is not None
    assert call.generations[0].tokens[-1] in served.renderer.stop_ids


async def test_a_streamed_parse_gives_the_same_model(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=Weather, seed=5
    )
    async with client.chat.completions.stream(
        model=MODEL, messages=QUESTION, response_format=Weather, seed=5
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed


async def test_json_object_gives_an_object_or_is_cut_off(client: AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        response_format={"type": "json_object"},
        max_tokens=60,
        n=3,
    )
    for choice in reply.choices:
        assert choice.message.content is not None
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)


async def test_plain_text_is_no_constraint(client: AsyncOpenAI, served: Gateway) -> None:
    await client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[ADD], response_format={"type": "text"}, max_tokens=5
    )
    [call] = await served.calls()
    assert call.generations[0].sampling.grammar is None


# ------------------------------------------------------------------------- calls


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called_if_one_is_required(client: AsyncOpenAI, stream: bool) -> None:
    async with client.chat.completions.stream(
        model=MODEL,
        messages=QUESTION,
        tools=[ADD, NOW],
        tool_choice="required",
        parallel_tool_calls=stream,
        temperature=0,
        max_tokens=200,
    ) as events:
        reply = await events.get_final_completion()
    calls = reply.choices[0].message.tool_calls or []
    assert len(calls) == 1 or stream
    assert reply.choices[0].finish_reason == "tool_calls"
    for call in calls:
        arguments = json.loads(call.function.arguments)
        assert (call.function.name, set(arguments)) in [("add", {"a", "b"}), ("now", set())]


@pytest.mark.parametrize("name", ["add", "now"])
async def test_the_named_tool_is_called(client: AsyncOpenAI, name: str) -> None:
    reply = await client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        tools=[ADD, NOW],
        tool_choice={"type": "function", "function": {"name": name}},
    )
    [call] = reply.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == name
    assert set(json.loads(call.function.arguments)) == ({"a", "b"} if name == "add" else set())


async def test_a_schema_beside_tools_leaves_the_choice_to_the_model(client: AsyncOpenAI) -> None:
    for seed in range(4):
        reply = await client.chat.completions.parse(
            model=MODEL, messages=QUESTION, tools=[ADD], response_format=Weather, seed=seed
        )
        message = reply.choices[0].message
        assert bool(message.tool_calls) != isinstance(message.parsed, Weather)


# ------------------------------------------------------------------------- refusals


SUBTRACT = {"type": "function", "function": {"name": "subtract"}}
UNIQUE = {
    "type": "json_schema",
    "json_schema": {"name": "set", "schema": {"type": "array", "uniqueItems": True}},
}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tools": [ADD], "tool_choice": SUBTRACT}, "subtract"),
        ({"tool_choice": "required"}, "no tools"),
        ({"response_format": UNIQUE}, "uniqueItems"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
    ],
)
async def test_what_cannot_be_honored_is_refused(
    client: AsyncOpenAI, served: Gateway, settings: dict[str, Any], why: str
) -> None:
    for stream in (False, True):
        with pytest.raises(BadRequestError, match=why):
            await client.chat.completions.create(
                model=MODEL, messages=QUESTION, stream=stream, **settings
            )
    assert await served.calls() == []


def test_odd_tools_are_refused(renderer: Renderer) -> None:
    with pytest.raises(RequestError, match="without a function name"):
        build_constraint([{"type": "function", "function": {}}], tool_name="x")
    strange = build_constraint([tool('a"b', {})], choice="required")
    assert strange is not None
    with pytest.raises(RequestError, match="cannot be the name"):
        strange.to_grammar(detect_output_format(renderer))


# ------------------------------------------------------------------------- what is trained


async def test_a_constrained_turn_is_context_of_the_turn_after_it(
    client: AsyncOpenAI, served: Gateway
) -> None:
    first = await client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[ADD], tool_choice="required"
    )
    message = first.choices[0].message
    results: list[Any] = [
        {"role": "tool", "tool_call_id": call.id, "content": "5"}
        for call in message.tool_calls or []
    ]
    await client.chat.completions.create(
        model=MODEL,
        messages=[*QUESTION, cast(Any, message.model_dump(exclude_none=True)), *results],
        tools=[ADD],
        max_tokens=20,
    )
    calls = tuple(await served.calls())
    trajectory = Trajectory(attempt=served.attempt, calls=calls, rewards=(), reward=1.0)
    credit = Credit(trajectory, {call.generation_id(0): 1.0 for call in calls})
    built = build_rows([credit])
    assert built.constrained == (calls[0].generation_id(0),)
    assert built.unproven == ()
    [row] = built.rows
    assert [segment.generation for segment in row.segments] == [calls[1].generation_id(0)]


# ------------------------------------------------------------------------- grammars


def follows(renderer: Renderer, grammar: str, text: str, folder: Path = TINY) -> bool:
    """Whether a text is a whole sentence of a grammar."""
    (end,) = renderer.stop_ids[:1]
    matcher = Grammars(folder, renderer.stop_ids).create_matcher(grammar, [end])
    for id in renderer.template.encode(text):
        if not matcher.allowed_V[id]:
            return False
        matcher.advance(id)
    return bool(matcher.allowed_V[end])


def test_several_calls_follow_the_grammar_only_where_several_may(renderer: Renderer) -> None:
    output = detect_output_format(renderer)
    many = Constraint(tools=(CHAT_TOOL,)).to_grammar(output)
    single = Constraint(tools=(CHAT_TOOL,), parallel=False).to_grammar(output)
    call = CALLING.replace("   ", " ")
    assert follows(renderer, many, call)
    assert follows(renderer, many, f"{call}\n{call}")
    assert follows(renderer, single, call)
    assert not follows(renderer, single, f"{call}\n{call}")
    assert not follows(renderer, many, "")


@pytest.mark.parametrize("close", ["</think>", "<tool_call>"])
def test_a_model_that_thinks_may_think_first(renderer: Renderer, close: str) -> None:
    # The second is a token of this tokenizer, as marks of thinking are in real ones.
    output = OutputFormat(renderer.template.encode, ("", ""), None, ("<think>", close))
    only = Constraint(schema={"enum": [1, 2]})
    fresh, opened = only.to_grammar(output), only.to_grammar(output, in_thinking=True)
    assert follows(renderer, fresh, f"<think>a < b\n{close}\n\n1")
    assert follows(renderer, fresh, "2")
    assert follows(renderer, opened, f"so\n{close}2")
    assert not follows(renderer, opened, "2")
    assert not follows(renderer, fresh, f"<think>{close}3")


@pytest.mark.parametrize("name", sorted(n for n in trl_templates() if "training" not in n))
def test_what_is_forced_in_a_real_form_is_read_back(tmp_path: Path, name: str) -> None:
    renderer = Renderer(template_of(tmp_path, name, trl_templates()[name]))
    output = detect_output_format(renderer)
    opened = renderer.prompt_opens_thinking
    thought = f"So.{output.thinking[1]}" if output.thinking and opened else ""
    answer = Constraint(schema={"enum": ["yes"]}).to_grammar(output, in_thinking=opened)
    assert follows(renderer, answer, thought + '"yes"'.join(output.answer), tmp_path)
    if (form := output.calls) is None:
        return
    grammar = Constraint(tools=(ADD,)).to_grammar(output, in_thinking=opened)
    text = f'{form.before}add{form.middle}{{"a": 1, "b": 2}}{form.after}'
    assert follows(renderer, grammar, thought + text, tmp_path)
    parsed = renderer.parser.parse(text, [ADD])
    assert parsed is not None
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == [
        ("add", {"a": 1, "b": 2})
    ]
