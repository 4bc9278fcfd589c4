"""Engines of servers: which replica is asked, what happens when one fails, whose weights it was."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from inference_server import ServerState, serve, sglang_app, vllm_app
from tiny_llama import CONTEXT, VOCABULARY, ask, decode, prompt_of
from whet.engines.joining import join_servers
from whet.engines.replicas import ServedWeights
from whet.engines.served import ServedEngine
from whet.errors import ConfigError, EngineBusy, EngineError, RequestError
from whet.serving import AppServer
from whet.types import Sampling

pytestmark = pytest.mark.anyio

PROMPT = prompt_of(20)


@dataclass
class Bench:
    """Servers and an engine of them."""

    engine: ServedEngine
    servers: list[AppServer]
    states: list[ServerState]

    def kill(self, index: int) -> int:
        """Returns its port."""
        self.servers[index].close()
        return int(self.servers[index].url.rpartition(":")[2])

    def start(self, index: int, port: int) -> None:
        self.states[index] = ServerState(decode, VOCABULARY, CONTEXT)
        self.servers[index] = serve(vllm_app, self.states[index], port)

    def asked(self) -> list[int]:
        """Requests of each server, without the two probes."""
        return [len(state.requests) - 2 for state in self.states]


@asynccontextmanager
async def bench(replicas: int = 1, **settings: object) -> AsyncGenerator[Bench]:
    limits = {k: settings.pop(k) for k in ("at_once", "most_waiting") if k in settings}
    states = [ServerState(decode, VOCABULARY, CONTEXT, **settings) for _ in range(replicas)]
    servers = [serve(vllm_app, state) for state in states]
    urls = [server.url for server in servers]
    with anyio.fail_after(30):
        engine = await join_servers(
            "vllm", urls, decode, context_length=CONTEXT, say=print, **limits
        )
        made = Bench(engine, servers, states)
        try:
            yield made
        finally:
            await engine.close()
            for server in made.servers:
                server.close()


def adapter(version: int) -> ServedWeights:
    return ServedWeights(version, "lora", Path(f"/adapters/{version}"), f"v{version}")


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110 - the server is another thread
        await anyio.sleep(0.01)


# ------------------------------------------------------------------- replicas


async def test_an_affinity_stays_with_its_replica_and_new_ones_spread() -> None:
    async with bench(3) as b:
        for turn in range(3):
            for attempt in range(6):
                left = b.engine.generate(
                    PROMPT, Sampling(max_tokens=1 + turn), affinity=f"a{attempt}"
                )
                async with aclosing(left):
                    await anext(left)
        assert sum(b.asked()) == 18
        seen = [{r["max_tokens"] for r in state.requests[2:]} for state in b.states]
        assert all(turns in (set(), {1, 2, 3}) for turns in seen), "a conversation changed places"


async def test_requests_at_once_go_where_least_is_under_way() -> None:
    async with bench(2, pause_s=0.005) as b:
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(ask, b.engine, PROMPT)
        assert b.asked() == [4, 4]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_replica_is_not_noticed_by_who_asks(stream: bool) -> None:
    async with bench(2) as b:
        b.kill(0)
        for _ in range(4):
            assert (await ask(b.engine, PROMPT, stream=stream, max_tokens=3)).stop == "length"
        assert len(b.states[1].requests) == 2 + 4


async def test_an_answer_that_fails_whole_is_asked_of_another() -> None:
    async with bench(2) as b:
        b.states[0].breaks_after = 0
        answers = [await ask(b.engine, PROMPT, max_tokens=3) for _ in range(4)]
        assert [answer.stop for answer in answers] == ["length"] * 4


async def test_a_stream_that_breaks_after_its_first_token_fails() -> None:
    async with bench(2) as b:
        b.states[0].breaks_after = b.states[1].breaks_after = 3
        pieces = b.engine.generate(PROMPT, Sampling(max_tokens=9), stream=True)
        with pytest.raises(EngineError, match="failed"):
            async for _ in pieces:
                pass


async def test_a_replica_that_comes_back_has_the_weights_before_it_is_asked() -> None:
    async with bench(1) as b:
        await b.engine.load(adapter(1))
        await b.engine.load(adapter(2))
        assert (await ask(b.engine, PROMPT, max_tokens=2)).versions == (2, 2)
        port = b.kill(0)
        async with anyio.create_task_group() as tasks:
            waits = ask(b.engine, PROMPT, max_tokens=2)
            tasks.start_soon(anyio.sleep, 0.2)
            b.start(0, port)
            assert (await waits).versions == (2, 2)
        assert b.states[0].loaded == ["/adapters/2"]


async def test_with_no_replica_left_the_reason_is_told() -> None:
    async with bench(1) as b:
        b.engine._patience_s = 0.2  # pyright: ignore[reportPrivateUsage]
        b.kill(0)
        with pytest.raises(EngineError, match=r"http://127.0.0.1:\d+ is not there: \w+Error"):
            await ask(b.engine, PROMPT)


async def test_more_than_may_wait_are_turned_away() -> None:
    async with bench(1, at_once=2, most_waiting=3, pause_s=0.01) as b:
        refused = 0

        async def one() -> None:
            nonlocal refused
            try:
                await ask(b.engine, PROMPT, max_tokens=5)
            except EngineBusy:
                refused += 1

        async with anyio.create_task_group() as tasks:
            for _ in range(9):
                tasks.start_soon(one)
        assert refused == 4
        assert (await ask(b.engine, PROMPT, max_tokens=1)).stop == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_whoever_leaves_makes_room_and_stops_the_server(stream: bool) -> None:
    async with bench(1, at_once=1, pause_s=0.01) as b:
        left = b.engine.generate(PROMPT, Sampling(), stream=stream)
        if stream:
            await anext(left)
            await left.aclose()
        else:
            with anyio.move_on_after(0.1):
                await anext(left)
            await left.aclose()
        if stream:  # starlette tells only a stream that its client has left
            await until(lambda: b.states[0].engines["model"].active == 0)
            before = b.states[0].sampled
            await anyio.sleep(0.1)
            assert b.states[0].sampled == before < 400
        assert (await ask(b.engine, PROMPT, max_tokens=1)).stop == "length"


async def test_an_engine_is_closed_by_whoever_is_told_to_stop() -> None:
    async with bench(1) as b:
        await ask(b.engine, PROMPT, max_tokens=1)
        session = b.engine._http.session()  # pyright: ignore[reportPrivateUsage]
        with anyio.CancelScope() as scope:
            scope.cancel()
            await b.engine.close()
        assert session.closed


async def test_what_was_sampled_while_nobody_looked_is_one_piece() -> None:
    async with bench(1, pause_s=0.01) as b:
        before = b.states[0].sampled
        pieces = b.engine.generate(PROMPT, Sampling(max_tokens=30), stream=True)
        taken = len((await anext(pieces)).tokens)
        await until(lambda: b.states[0].sampled == before + 29)  # it does not count the first
        await anyio.sleep(0.1)  # for what is on its way
        [rest] = [piece async for piece in pieces]
        assert taken + len(rest.tokens) == 30
        assert rest.stop == "length"


# ------------------------------------------------------------------- weights


async def test_each_generation_is_of_the_weights_it_began_with() -> None:
    async with bench(1, pause_s=0.005) as b:
        await b.engine.load(adapter(1))
        early = b.engine.generate(PROMPT, Sampling(max_tokens=40), stream=True)
        first = await anext(early)
        await b.engine.load(adapter(2))
        late = await ask(b.engine, PROMPT, max_tokens=3)
        assert b.states[0].unloaded == [], "somebody still samples from it"
        rest = [piece async for piece in early]
        assert {v for piece in (first, *rest) for v in piece.versions} == {1}
        assert late.versions == (2, 2, 2)
        await b.engine.load(adapter(3))
        assert b.states[0].unloaded == ["v1", "v2"]
        assert set(b.states[0].engines) == {"model", "v3"}


async def test_full_weights_wait_for_who_samples_and_hold_back_who_comes() -> None:
    async with bench(2, pause_s=0.005) as b:
        async with anyio.create_task_group() as tasks:
            early = b.engine.generate(PROMPT, Sampling(max_tokens=30), stream=True)
            versions = set((await anext(early)).versions)
            weights = ServedWeights(1, "full", Path("/weights/1"))
            tasks.start_soon(b.engine.load, weights)
            await anyio.sleep(0.02)
            assert [state.loaded for state in b.states] == [[], []]
            async for piece in early:
                versions |= set(piece.versions)
            late = await ask(b.engine, PROMPT, max_tokens=2)
        assert versions == {0}
        assert late.versions == (1, 1)
        assert [state.loaded for state in b.states] == [["/weights/1"], ["/weights/1"]]


@pytest.mark.parametrize(
    ("lacking", "weights", "said"),
    [
        ("takes_adapters", adapter(1), "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA"),
        ("takes_weights", ServedWeights(1, "full", Path("/w")), "VLLM_SERVER_DEV_MODE=1"),
    ],
)
async def test_a_server_that_takes_no_weights_is_told_in_one_line(
    lacking: str, weights: ServedWeights, said: str
) -> None:
    async with bench(1, **{lacking: False}) as b:
        with pytest.raises(EngineError, match=said):
            await b.engine.load(weights)


# ------------------------------------------------------------------- what a version lacks


async def joined(app: object = vllm_app, **settings: bool) -> str:
    """The error that joining such a server gives."""
    server = serve(app, ServerState(decode, VOCABULARY, CONTEXT, **settings))
    try:
        with pytest.raises(ConfigError) as raised:
            await join_servers("vllm", [server.url], decode, context_length=CONTEXT, say=print)
    finally:
        server.close()
    return str(raised.value)


async def test_a_vllm_that_tells_no_token_ids_is_too_old() -> None:
    said = await joined(tells_ids=False)
    assert "vLLM 0.9.1" in said
    assert "return_token_ids is missing" in said
    assert "use 0.10.2 or newer" in said


async def test_something_else_is_no_vllm() -> None:
    assert "there is no vLLM at http://127.0.0.1" in await joined(sglang_app)


async def test_servers_that_differ_are_refused() -> None:
    states = [ServerState(decode, VOCABULARY, context) for context in (CONTEXT, 256)]
    servers = [serve(vllm_app, state) for state in states]
    urls = [server.url for server in servers]
    with pytest.raises(ConfigError, match=r"differ \(context_length\)"):
        await join_servers("vllm", urls, decode, context_length=CONTEXT, say=print)
    for server in servers:
        server.close()


async def test_raw_logprobs_are_used_only_where_they_are_those_of_the_sample() -> None:
    async with bench(1, processed=False) as b:
        assert (await ask(b.engine, PROMPT, max_tokens=2)).stop == "length"
        assert (await ask(b.engine, PROMPT, max_tokens=2, temperature=0)).stop == "length"
        for shaped in ({"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}):
            with pytest.raises(RequestError, match="--logprobs-mode processed_logprobs"):
                await ask(b.engine, PROMPT, **shaped)


async def test_nothing_is_left_to_the_models_own_defaults() -> None:
    async with bench(1) as b:
        await ask(b.engine, PROMPT, max_tokens=2)
        sent = b.states[0].requests[-1]
        assert sent["prompt"] == PROMPT
        assert sent["repetition_penalty"] == 1.0
        assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["min_p"]) == (1, 1, -1, 0)
        assert sent["ignore_eos"] is True
