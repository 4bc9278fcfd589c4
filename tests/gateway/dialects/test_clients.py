"""The official clients, unmodified, against a served gateway with the tiny model."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import anyio
import openai
import pytest
from anyio.from_thread import start_blocking_portal
from pydantic import BaseModel

from support.gateway.scripted_gateway import CLAUDE_TOOL, MODEL, SECRET, TINY
from whet.config import GatewayConfig, LocalEngineConfig, LocalTrainerConfig
from whet.demos.problems import CALCULATOR, EXAMPLE, SYSTEM
from whet.engines.local.engine import LocalEngine
from whet.engines.local.grammar import Grammars
from whet.gateway import auth
from whet.gateway.app import build_app
from whet.gateway.pipeline import CallPipeline
from whet.gateway.templates.renderer import Renderer
from whet.io.server import AppServer
from whet.models.huggingface import LocalPolicy
from whet.store.sqlite import SQLiteStore
from whet.types import AttemptId, Call, Rollout

pytestmark = pytest.mark.anyio

QUESTION = "Ann has 12 apples and buys 30 more. How many apples does she have now?"
CHAT: list[Any] = [
    {"role": "system", "content": SYSTEM},
    *EXAMPLE,
    {"role": "user", "content": QUESTION},
]
TOOL: Any = CALCULATOR
FLAT: Any = {"type": "function", "strict": None} | CALCULATOR["function"]
CLAUDE: Any = CLAUDE_TOOL


@dataclass
class Served:
    """A gateway that listens."""

    url: str
    attempt: AttemptId
    store: SQLiteStore

    @property
    def key(self) -> str:
        return auth.mint_key(self.attempt, SECRET)

    @property
    def openai(self) -> dict[str, Any]:
        return {"base_url": f"{self.url}/v1", "api_key": self.key, "max_retries": 0}

    @property
    def anthropic(self) -> dict[str, Any]:
        return {"base_url": self.url, "api_key": self.key, "max_retries": 0}

    def calls(self) -> list[Call]:
        return anyio.run(self.store.calls, self.attempt)


@pytest.fixture(scope="module")
def engine(renderer: Renderer) -> Iterator[LocalEngine]:
    policy = LocalPolicy(TINY, LocalTrainerConfig(), device="cpu", seed=0)
    grammars = Grammars(TINY, renderer.stop_ids)
    decode = renderer.template.decode
    config = LocalEngineConfig(kv_tokens=8192)
    engine = LocalEngine(policy, config, decode, grammars=grammars, threads=1)
    yield engine
    anyio.run(engine.close)


@pytest.fixture
def served(tmp_path: Path, renderer: Renderer, engine: LocalEngine) -> Iterator[Served]:
    with start_blocking_portal() as portal:
        store = SQLiteStore(tmp_path / "store.db")
        portal.call(store.enqueue, [Rollout(id="r", task={}, group="g")])

        async def claim() -> AttemptId:
            attempt = await store.claim("w", lease_s=600, wait_s=0)
            assert attempt is not None
            return attempt.id

        pipeline = CallPipeline(
            engine=engine,
            log=store,
            renderer=renderer,
            models=(MODEL,),
            context_length=engine.context_length,
        )
        app = build_app(pipeline, SECRET, GatewayConfig())
        server = AppServer(app)
        try:
            yield Served(server.url, portal.call(claim), store)
        finally:
            server.close()
            portal.call(store.close)


def validated(value: Any) -> None:
    """Check a reply by the SDK's own model, which it does not do by itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a field of another type than the model says
        plain = value.model_dump(mode="json", by_alias=True)
    type(value).model_validate(plain)
    assert None not in (plain["id"], plain["model"])


def check_continues(served: Served) -> None:
    *_, one, two = (call for call in served.calls() if call.generations)
    assert two.parent == one.generation_id(0)
    assert two.origin.fork is None


# ------------------------------------------------------------------- openai, chat


def test_chat_completions(served: Served) -> None:
    with openai.OpenAI(**served.openai) as client:
        reply = client.chat.completions.create(
            model=MODEL, messages=CHAT, tools=[TOOL], temperature=0, logprobs=True, top_logprobs=2
        )
        validated(reply)
        message = reply.choices[0].message
        assert reply.usage is not None
        assert reply.choices[0].logprobs is not None
        messages: list[Any] = [*CHAT, message]
        for call in message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "42"})
        if not message.tool_calls:
            messages.append({"role": "user", "content": "again"})
        validated(client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL]))
    check_continues(served)


def test_chat_completions_streamed_and_accumulated(served: Served) -> None:
    with openai.OpenAI(**served.openai) as client:
        chunks = list(
            client.chat.completions.create(
                model=MODEL,
                messages=CHAT,
                tools=[TOOL],
                temperature=0,  # sampled, it might talk until its context is full
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        for chunk in chunks:
            validated_chunk = type(chunk).model_validate(chunk.model_dump())
            assert validated_chunk.id == chunks[0].id
        assert chunks[-1].usage is not None
        with client.chat.completions.stream(
            model=MODEL, messages=CHAT, tools=[TOOL], temperature=0
        ) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
    assert "chunk" in kinds
    validated(final)
    assert final.choices[0].finish_reason in ("stop", "tool_calls")


def test_raw_responses_have_the_requested_token_ids(served: Served) -> None:
    with openai.OpenAI(**served.openai) as client:
        reply = client.chat.completions.create(
            model=MODEL, messages=CHAT, extra_body={"return_token_ids": True}
        )
    [call] = served.calls()
    assert reply.model_extra is not None
    assert reply.model_extra["prompt_token_ids"] == list(call.prompt_suffix)
    extra = reply.choices[0].model_extra
    assert extra is not None
    assert extra["token_ids"] == list(call.generations[0].tokens)


class Answer(BaseModel):
    number: int


def test_chat_parse_gives_an_object_of_the_schema(served: Served) -> None:
    with openai.OpenAI(**served.openai) as client:
        reply = client.chat.completions.parse(
            model=MODEL, messages=CHAT, response_format=Answer, temperature=0, max_tokens=200
        )
    assert isinstance(reply.choices[0].message.parsed, Answer)
    [call] = served.calls()
    assert call.generations[0].sampling.grammar is not None


async def test_the_async_client_with_many_calls_at_once(served: Served) -> None:
    async with openai.AsyncOpenAI(**served.openai) as client, anyio.create_task_group() as tasks:

        async def one() -> None:
            reply = await client.chat.completions.create(
                model=MODEL, messages=CHAT, max_tokens=8, n=2
            )
            assert len(reply.choices) == 2

        async def streamed() -> None:
            stream = await client.chat.completions.create(
                model=MODEL, messages=CHAT, max_tokens=8, stream=True
            )
            assert [chunk async for chunk in stream]

        for _ in range(4):
            tasks.start_soon(one)
            tasks.start_soon(streamed)
    assert len(await served.store.calls(served.attempt)) == 8


def test_errors_are_the_clients_own(served: Served) -> None:
    with openai.OpenAI(**served.openai) as client:
        with pytest.raises(openai.BadRequestError, match="audio") as caught:
            client.chat.completions.create(
                model=MODEL, messages=CHAT, extra_body={"audio": {"voice": "x"}}
            )
        assert caught.value.code == "invalid_request"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="gpt-4o", messages=CHAT)
        long: Any = [{"role": "user", "content": "word " * 5000}]
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=long)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="sk-other").models.list()
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL


def test_completions(served: Served) -> None:
    with openai.OpenAI(**served.openai) as client:
        reply = client.completions.create(model=MODEL, prompt="2 + 2 =", max_tokens=5, logprobs=2)
        validated(reply)
        assert reply.choices[0].logprobs is not None
        chunks = list(client.completions.create(model=MODEL, prompt=[1, 2, 3], stream=True))
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")


# ------------------------------------------------------------------- openai, responses


def outputs_for(response: Any, result: str) -> list[Any]:
    """An agent's next items: a result for each call, or a word if there was none."""
    calls = [item for item in response.output if item.type == "function_call"]
    if not calls:
        return [{"role": "user", "content": "again"}]
    return [
        {"type": "function_call_output", "call_id": call.call_id, "output": result}
        for call in calls
    ]


def test_responses_with_state_kept_by_the_gateway(served: Served) -> None:
    with openai.OpenAI(**served.openai) as client:
        first = client.responses.create(
            model=MODEL, instructions=SYSTEM, input=QUESTION, tools=[FLAT], temperature=0
        )
        validated(first)
        second = client.responses.create(
            model=MODEL,
            instructions=SYSTEM,
            previous_response_id=first.id,
            input=outputs_for(first, "42"),
            tools=[FLAT],
        )
        validated(second)
        assert client.responses.retrieve(second.id).output_text == second.output_text
        items = client.responses.input_items.list(second.id)
        assert len(list(items)) >= 2
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
    check_continues(served)


def test_responses_echoed_in_full(served: Served) -> None:
    with openai.OpenAI(**served.openai) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        first = client.responses.create(model=MODEL, input=messages, tools=[FLAT], store=False)
        messages += [*first.output, *outputs_for(first, "42")]
        client.responses.create(model=MODEL, input=messages, tools=[FLAT], store=False)
    check_continues(served)


def test_responses_streamed_and_accumulated(served: Served) -> None:
    with openai.OpenAI(**served.openai) as client:
        with client.responses.stream(
            model=MODEL, instructions=SYSTEM, input=QUESTION, tools=[FLAT]
        ) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        validated(final)
        stored = client.responses.retrieve(final.id)
        assert stored.output_text == final.output_text


def test_responses_parse_gives_an_object_of_the_schema(served: Served) -> None:
    with openai.OpenAI(**served.openai) as client:
        reply = client.responses.parse(
            model=MODEL, input=QUESTION, text_format=Answer, temperature=0, max_output_tokens=200
        )
    assert isinstance(reply.output_parsed, Answer)


async def test_the_async_responses_client(served: Served) -> None:
    async with openai.AsyncOpenAI(**served.openai) as client:
        reply = await client.responses.create(model=MODEL, input="hi", max_output_tokens=4)
        validated(reply)
        async with client.responses.stream(model=MODEL, input="hi") as stream:
            assert [event async for event in stream]


# ------------------------------------------------------------------- anthropic


def test_messages(served: Served) -> None:
    with anthropic.Anthropic(**served.anthropic) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        first = client.messages.create(
            model=MODEL, max_tokens=64, system=SYSTEM, messages=messages, tools=[CLAUDE]
        )
        validated(first)
        used = [block for block in first.content if block.type == "tool_use"]
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "42"} for block in used
        ]
        messages.append({"role": "assistant", "content": first.content})
        messages.append({"role": "user", "content": results or "again"})
        counted = client.messages.count_tokens(
            model=MODEL, system=SYSTEM, messages=messages, tools=[CLAUDE]
        )
        second = client.messages.create(
            model=MODEL, max_tokens=64, system=SYSTEM, messages=messages, tools=[CLAUDE]
        )
        validated(second)
        assert counted.input_tokens == second.usage.input_tokens
        assert [model.id for model in client.models.list()] == [MODEL]
    check_continues(served)


def test_messages_streamed_and_accumulated(served: Served) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with (
        anthropic.Anthropic(**served.anthropic) as client,
        client.messages.stream(
            model=MODEL, max_tokens=64, system=SYSTEM, messages=messages, tools=[CLAUDE]
        ) as stream,
    ):
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    validated(final)
    assert text == "".join(block.text for block in final.content if block.type == "text")
    [call] = served.calls()
    assert final.usage.output_tokens == len(call.generations[0].tokens)


async def test_the_async_messages_client(served: Served) -> None:
    async with anthropic.AsyncAnthropic(**served.anthropic) as client:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        reply = await client.messages.create(model=MODEL, max_tokens=4, messages=messages)
        validated(reply)
        async with client.messages.stream(model=MODEL, max_tokens=4, messages=messages) as stream:
            await stream.get_final_message()


def test_messages_held_to_a_schema(served: Served) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with (
        anthropic.Anthropic(**served.anthropic) as client,
        client.messages.stream(
            model=MODEL,
            max_tokens=200,
            messages=messages,
            output_format=Answer,
            extra_body={"temperature": 0},
        ) as stream,
    ):
        final = stream.get_final_message()
    [block] = [block for block in final.content if block.type == "text"]
    assert isinstance(block.parsed_output, Answer)


# The runner warns of a tool that does not exist, which a sampled call may well name.
@pytest.mark.filterwarnings("ignore:Tool '.*' not found in tool runner")
def test_the_tool_runner_falls_back_from_threads_to_the_whole_history(served: Served) -> None:
    @anthropic.beta_tool
    def calculator(expression: str) -> str:
        """Evaluate an expression."""
        return f"{expression} = 42"

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with anthropic.Anthropic(**served.anthropic) as client:
        runner = client.beta.messages.tool_runner(
            model=MODEL, max_tokens=64, system=SYSTEM, messages=messages, tools=[calculator]
        )
        messages = [message for _, message in zip(range(3), runner, strict=False)]
    assert messages
    calls = served.calls()
    for one, two in pairwise(calls):
        assert two.parent == one.generation_id(0)


def test_anthropic_errors_are_the_clients_own(served: Served) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    with anthropic.Anthropic(**served.anthropic) as client:
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="claude", max_tokens=4, messages=messages)
        with pytest.raises(anthropic.BadRequestError, match="container"):
            client.messages.create(
                model=MODEL, max_tokens=4, messages=messages, extra_body={"container": "x"}
            )
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="other").messages.create(
                model=MODEL, max_tokens=4, messages=messages
            )
