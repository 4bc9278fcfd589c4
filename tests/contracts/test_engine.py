"""The contract of every engine. A new engine is done when it passes this file."""

import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
from starlette.applications import Starlette

from support.models.tiny_llama import CONTEXT, VOCABULARY, Answer, ask, decode, load, prompt_of
from support.servers.inference_server import ServerState, serve, sglang_app, vllm_app
from support.servers.tinker_serving import MARKS, Server, open_tinker
from whet.config import LocalEngineConfig
from whet.engines.fake import FakeEngine
from whet.engines.local.engine import LocalEngine
from whet.engines.local.forward import CudaGraphForward
from whet.engines.remote.connect import connect_servers
from whet.engines.socket_engine import EngineServer, SocketEngine
from whet.errors import EngineError, PromptTooLong, RequestError
from whet.protocols import Engine
from whet.types import Sampling

pytestmark = pytest.mark.anyio

PROMPT = prompt_of(20)


def local(folder: Path) -> Engine:
    return LocalEngine(load(folder), LocalEngineConfig(kv_tokens=4096), decode, threads=1)


def static(folder: Path) -> Engine:
    """As on a GPU, but without its kernels and graphs."""
    config = LocalEngineConfig(kv_tokens=4096)
    return LocalEngine(load(folder), config, decode, threads=1, forward=CudaGraphForward)


def fake(folder: Path) -> Engine:
    return FakeEngine(decode=decode, vocabulary=VOCABULARY, context_length=CONTEXT)


@asynccontextmanager
async def served(
    kind: Literal["vllm", "sglang"], app: Callable[[ServerState], Starlette], **settings: Any
) -> AsyncGenerator[Engine]:
    """A small server that speaks the wire of a large one."""
    state = ServerState(decode, VOCABULARY, CONTEXT, pause_s=0.001, **settings)
    server = serve(app, state)
    yield await connect_servers(kind, [server.url], decode, context_length=CONTEXT, progress=print)
    server.close()


@asynccontextmanager
async def over_socket() -> AsyncGenerator[Engine]:
    """An engine as another process sees it."""
    inner = FakeEngine(decode=decode, vocabulary=VOCABULARY, context_length=CONTEXT)
    mine, other = socket.socketpair()
    server = EngineServer(inner)
    await server.add(mine)
    yield SocketEngine(other)
    await server.close()
    assert inner.active == 0, "a request outlived its connection"


SERVED = {
    "socket": over_socket,
    "vllm": partial(served, "vllm", vllm_app),
    "vllm tokens": partial(served, "vllm", vllm_app, token_path=True),
    "sglang": partial(served, "sglang", sglang_app),
    "sglang incremental": partial(served, "sglang", sglang_app, incremental=True),
}


async def at_tinker(server: Server) -> Engine:
    from whet.engines.tinker import TinkerEngine

    policy = await open_tinker(server)
    await policy.publish()
    return TinkerEngine(policy, decode)


@pytest.fixture(params=[local, static, fake, *SERVED, pytest.param("tinker", marks=MARKS)])
async def engine(request: pytest.FixtureRequest, tiny_folder: Path) -> AsyncGenerator[Engine]:
    async with AsyncExitStack() as stack:
        if request.param in SERVED:
            engine = await stack.enter_async_context(SERVED[request.param]())
        elif request.param == "tinker":
            engine = await at_tinker(request.getfixturevalue("tinker"))
        else:
            engine = request.param(tiny_folder)
        with anyio.fail_after(30):
            yield engine
            await engine.close()


def gives_all_at_once(engine: Engine) -> bool:
    return type(engine).__name__ == "TinkerEngine"  # which may not be installed


async def together(engine: Engine, count: int, **sampling: Any) -> list[Answer]:
    answers: dict[int, Answer] = {}

    async def one(index: int) -> None:
        answers[index] = await ask(engine, PROMPT, **sampling)

    async with anyio.create_task_group() as tasks:
        for index in range(count):
            tasks.start_soon(one, index)
    return [answers[index] for index in range(count)]


async def test_each_token_has_a_logprob_and_a_version(engine: Engine) -> None:
    answer = await ask(engine, PROMPT, max_tokens=9)
    assert len(answer.tokens) == len(answer.logprobs) == 9
    assert answer.versions == (0,) * 9
    assert all(logprob <= 0 for logprob in answer.logprobs)
    assert all(0 <= token < VOCABULARY for token in answer.tokens)
    assert answer.stop == "length"
    assert answer.top == ()


async def test_it_is_one_chunk_unless_streamed(engine: Engine) -> None:
    whole = await ask(engine, PROMPT, seed=1, max_tokens=50)
    streamed = await ask(engine, PROMPT, seed=1, max_tokens=50, stream=True)
    assert whole.chunks == 1
    # Over the socket, tokens of an instant engine may arrive together.
    may_be_one = gives_all_at_once(engine) or isinstance(engine, SocketEngine)
    assert (1 if may_be_one else 2) <= streamed.chunks <= 50
    assert streamed.tokens == whole.tokens
    assert streamed.logprobs == pytest.approx(whole.logprobs, abs=1e-5)


async def test_greedy_is_the_likeliest_token_each_time(engine: Engine) -> None:
    first, second = await together(engine, 2, temperature=0, max_tokens=8, top_logprobs=3)
    assert first.tokens == second.tokens
    assert first.tokens == tuple(top[0][0] for top in first.top)
    assert first.logprobs == pytest.approx([top[0][1] for top in first.top])
    assert all(len(top) == 3 for top in first.top)


async def test_a_seed_reproduces_alone_and_among_others(engine: Engine) -> None:
    alone = await ask(engine, PROMPT, seed=5, max_tokens=12)
    [among, *_] = await together(engine, 6, seed=5, max_tokens=12)
    other = await ask(engine, PROMPT, seed=6, max_tokens=12)
    assert alone.tokens == among.tokens
    assert alone.tokens != other.tokens


async def test_without_a_seed_equal_requests_differ(engine: Engine) -> None:
    answers = await together(engine, 4, max_tokens=12, seed=None)
    assert len({answer.tokens for answer in answers}) == 4


async def test_a_stop_id_is_the_last_token(engine: Engine) -> None:
    free = await ask(engine, PROMPT, seed=2, max_tokens=20)
    stop = free.tokens[5]
    stopped = await ask(engine, PROMPT, seed=2, max_tokens=20, stop_ids=[stop])
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert stopped.stop == "stop"


async def test_a_stop_string_ends_it_and_stays_in_the_tokens(engine: Engine) -> None:
    free = await ask(engine, PROMPT, seed=3, max_tokens=20)
    text = decode(free.tokens)
    stopped = await ask(engine, PROMPT, seed=3, max_tokens=20, stop=["no such", text[4:7]])
    assert decode(stopped.tokens) == text[: text.index(text[4:7]) + 3]
    assert stopped.stop == "stop"


async def test_a_stop_id_as_the_last_allowed_token_is_a_stop(engine: Engine) -> None:
    free = await ask(engine, PROMPT, temperature=0, max_tokens=1)
    stopped = await ask(engine, PROMPT, temperature=0, max_tokens=1, stop_ids=free.tokens)
    assert stopped.stop == "stop"


async def test_without_a_limit_it_fills_the_context(engine: Engine) -> None:
    answer = await ask(engine, prompt_of(CONTEXT - 10))
    assert len(answer.tokens) == 10
    assert answer.stop == "length"


async def test_top_k_of_one_is_greedy_with_certainty(engine: Engine) -> None:
    greedy = await ask(engine, PROMPT, temperature=0, max_tokens=5)
    only = await ask(engine, PROMPT, top_k=1, max_tokens=5, top_logprobs=4)
    assert only.tokens == greedy.tokens
    assert only.logprobs == pytest.approx([0.0] * 5, abs=1e-6)
    assert all(len(top) == 1 for top in only.top), "what is cut off is not among the likeliest"


async def test_a_tiny_top_p_is_greedy_with_certainty(engine: Engine) -> None:
    greedy = await ask(engine, PROMPT, temperature=0, max_tokens=5)
    only = await ask(engine, PROMPT, top_p=1e-6, max_tokens=5)
    assert only.tokens == greedy.tokens
    assert only.logprobs == pytest.approx([0.0] * 5, abs=1e-6)


@pytest.mark.parametrize("length", [0, CONTEXT, CONTEXT + 5])
async def test_a_prompt_without_room_is_refused(engine: Engine, length: int) -> None:
    with pytest.raises(PromptTooLong):
        await ask(engine, prompt_of(length))
    assert (await ask(engine, PROMPT, max_tokens=1)).stop == "length"


@pytest.mark.parametrize("token", [-1, VOCABULARY])
async def test_an_unknown_id_is_refused_without_affecting_others(
    engine: Engine, token: int
) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(together, engine, 2, max_tokens=20))
        with pytest.raises(RequestError):
            await ask(engine, [*PROMPT, token])


async def test_a_grammar_it_cannot_hold_to_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="grammar"):
        await ask(engine, PROMPT, grammar="start: /[0-9]+/")


async def test_closing_the_generator_stops_that_request_alone(engine: Engine) -> None:
    left = engine.generate(PROMPT, Sampling(), stream=True)
    await anext(left)
    other = engine.generate(PROMPT, Sampling(max_tokens=30), stream=True)
    chunks = [await anext(other)]
    await left.aclose()
    chunks += [chunk async for chunk in other]
    assert sum(len(chunk.tokens) for chunk in chunks) == 30
    assert chunks[-1].stop == "length"


async def test_the_prompt_is_read_when_the_sampling_begins(engine: Engine) -> None:
    prompt = list(PROMPT)
    chunks = engine.generate(prompt, Sampling(temperature=0, max_tokens=4), stream=True)
    first = await anext(chunks)
    prompt[:] = prompt_of(20, seed=9)
    tokens = first.tokens + tuple([t async for chunk in chunks for t in chunk.tokens])
    assert tokens == (await ask(engine, PROMPT, temperature=0, max_tokens=4)).tokens


async def test_a_closed_engine_refuses_and_closes_again(engine: Engine) -> None:
    await engine.close()
    await engine.close()
    with pytest.raises(EngineError):
        await ask(engine, PROMPT)


async def test_closing_the_engine_fails_what_is_in_flight(engine: Engine) -> None:
    chunks = engine.generate(PROMPT, Sampling(), stream=True)
    first = await anext(chunks)
    assert bool(first.stop) == gives_all_at_once(engine)
    await engine.close()
    if first.stop:
        return  # nothing is
    with pytest.raises(EngineError):
        async for _ in chunks:
            pass
