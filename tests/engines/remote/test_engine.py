"""Remote engines: load balancing over replicas, failures, and versions of weights."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
from starlette.applications import Starlette

from support.models.tiny_llama import CONTEXT, VOCABULARY, ask, decode, prompt_of
from support.servers.inference_server import ServerState, serve, sglang_app, vllm_app
from whet.engines.remote import engine, vllm
from whet.engines.remote.connect import connect_servers
from whet.engines.remote.engine import RemoteEngine
from whet.engines.remote.replicas import WeightsSpec
from whet.errors import ConfigError, EngineBusy, EngineError, RequestError
from whet.io.server import AppServer
from whet.types import Sampling

pytestmark = pytest.mark.anyio

PROMPT = prompt_of(20)


@pytest.fixture(autouse=True)
def checked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "CHECK_INTERVAL_S", 0.5)


App = Callable[[ServerState], Starlette]
KINDS = {"vllm": vllm_app, "sglang": sglang_app}


@dataclass
class Bench:
    """Servers and an engine of them."""

    engine: RemoteEngine
    servers: list[AppServer]
    states: list[ServerState]

    def kill(self, index: int) -> int:
        """Returns its port."""
        self.servers[index].close()
        return int(self.servers[index].url.rpartition(":")[2])

    def start(self, index: int, port: int, app: App = vllm_app) -> None:
        self.states[index] = ServerState(decode, VOCABULARY, CONTEXT)
        self.servers[index] = serve(app, self.states[index], port)

    def request_counts(self) -> list[int]:
        """Requests of each server, without the two probes."""
        return [len(state.requests) - 2 for state in self.states]


@asynccontextmanager
async def bench(
    replicas: int = 1, kind: Literal["vllm", "sglang"] = "vllm", **settings: Any
) -> AsyncGenerator[Bench]:
    limits = {k: settings.pop(k) for k in ("max_active", "max_waiting") if k in settings}
    states = [ServerState(decode, VOCABULARY, CONTEXT, **settings) for _ in range(replicas)]
    servers = [serve(KINDS[kind], state) for state in states]
    urls = [server.url for server in servers]
    with anyio.fail_after(30):
        engine = await connect_servers(
            kind, urls, decode, context_length=CONTEXT, progress=print, **limits
        )
        made = Bench(engine, servers, states)
        try:
            yield made
        finally:
            await engine.close()
            for server in made.servers:
                server.close()


def adapter(version: int) -> WeightsSpec:
    return WeightsSpec(version, "lora", Path(f"/adapters/{version}"), f"v{version}")


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
        assert sum(b.request_counts()) == 18
        seen = [{r["max_tokens"] for r in state.requests[2:]} for state in b.states]
        assert all(turns in (set(), {1, 2, 3}) for turns in seen), "a conversation changed places"


async def test_requests_at_once_go_where_least_is_under_way() -> None:
    async with bench(2, pause_s=0.005) as b:
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(partial(ask, b.engine, PROMPT, max_tokens=60))
        assert b.request_counts() == [4, 4]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_replica_is_not_noticed_by_the_caller(stream: bool) -> None:
    async with bench(2) as b:
        b.kill(0)
        for _ in range(4):
            assert (await ask(b.engine, PROMPT, stream=stream, max_tokens=3)).stop == "length"
        assert len(b.states[1].requests) == 2 + 4


async def test_a_request_at_a_server_that_hangs_is_sent_to_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine, "CHECK_INTERVAL_S", 0.01)
    async with bench(2) as b:
        b.states[0].pause_s, b.states[0].healthy = 1.0, False
        with anyio.fail_after(10):
            assert (await ask(b.engine, PROMPT, max_tokens=3)).stop == "length"
        assert [state.requests[-1]["max_tokens"] for state in b.states] == [3, 3]
        assert "error=ConnectionAbortedError: /health answers" in caplog.text


async def test_a_failed_reply_is_requested_from_another_replica() -> None:
    async with bench(2) as b:
        b.states[0].breaks_after = 0
        answers = [await ask(b.engine, PROMPT, max_tokens=3) for _ in range(4)]
        assert [answer.stop for answer in answers] == ["length"] * 4


async def test_a_request_that_fails_whenever_it_is_sent_is_reported() -> None:
    async with bench(1) as b:
        b.states[0].breaks_after = 0
        with pytest.raises(EngineError, match="failed"):
            await ask(b.engine, PROMPT, max_tokens=3)
        assert b.request_counts() == [3]


async def test_a_stream_that_breaks_after_its_first_token_fails() -> None:
    async with bench(2) as b:
        b.states[0].breaks_after = b.states[1].breaks_after = 3
        chunks = b.engine.generate(PROMPT, Sampling(max_tokens=9), stream=True)
        with pytest.raises(EngineError, match="failed"):
            async for _ in chunks:
                pass


async def test_a_restarted_replica_gets_the_weights_before_requests() -> None:
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


@pytest.mark.parametrize("kind", ["lora", "full"])
async def test_a_replica_that_comes_back_during_a_load_gets_the_newest_weights(
    kind: Literal["lora", "full"],
) -> None:
    old, new = adapter(1), adapter(2)
    if kind == "full":
        old, new = (WeightsSpec(v, "full", Path(f"/weights/{v}")) for v in (1, 2))
    async with bench(2) as b:
        await b.engine.load(old)
        await ask(b.engine, PROMPT, max_tokens=1)
        back = b.engine._replicas.all[0]
        port = b.kill(0)
        b.engine._replicas.mark_down(back, "killed")
        b.start(0, port)
        state = b.states[0]
        state.load_s = 0.3
        await until(lambda: len(state.loaded) == 1)  # the old weights, not loaded entirely
        await b.engine.load(new)
        b.engine._replicas.mark_down(b.engine._replicas.all[1], "killed")
        assert (await ask(b.engine, PROMPT, max_tokens=2)).versions == (2, 2)
        assert len(state.loaded) == 2


FULL = WeightsSpec(7, "full", Path("/weights/7"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_restarted_server_does_not_answer_from_its_own_weights(
    kind: Literal["vllm", "sglang"], stream: bool
) -> None:
    async with bench(1, kind) as b:
        base = await ask(b.engine, PROMPT, temperature=0, max_tokens=4, stream=stream)
        await b.engine.load(FULL)
        trained = await ask(b.engine, PROMPT, temperature=0, max_tokens=4, stream=stream)
        b.start(0, b.kill(0), KINDS[kind])  # between two health checks
        again = await ask(b.engine, PROMPT, temperature=0, max_tokens=4, stream=stream)
        assert b.states[0].loaded == ["/weights/7"]
    assert trained.tokens != base.tokens
    assert (again.tokens, again.versions) == (trained.tokens, (7,) * 4)


async def test_a_server_without_identity_gets_its_weights_again_after_a_failed_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "CHECK_INTERVAL_S", 0.01)
    async with bench(1, instance_id="") as b:
        await b.engine.load(FULL)
        await ask(b.engine, PROMPT, max_tokens=1)
        b.states[0].healthy = False
        await until(lambda: b.engine._replicas.all[0].failed_checks > 0)
        b.states[0].healthy = True
        await until(lambda: len(b.states[0].loaded) == 2)


async def test_an_adapter_that_a_restarted_sglang_lost_is_loaded_again() -> None:
    async with bench(1, "sglang") as b:
        await b.engine.load(adapter(2))
        b.start(0, b.kill(0), sglang_app)
        assert (await ask(b.engine, PROMPT, max_tokens=2)).versions == (2, 2)
        assert b.states[0].loaded == ["/adapters/2"]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_server_that_still_has_its_adapter_comes_back(
    kind: Literal["vllm", "sglang"],
) -> None:
    async with bench(1, kind) as b:
        b.engine._wait_timeout_s = 3
        await b.engine.load(adapter(2))
        b.engine._replicas.mark_down(b.engine._replicas.all[0], "a request failed")
        assert (await ask(b.engine, PROMPT, max_tokens=2)).versions == (2, 2)
        assert b.states[0].loaded == ["/adapters/2"]


async def test_with_no_replica_left_the_reason_is_reported() -> None:
    async with bench(1) as b:
        b.engine._wait_timeout_s = 0.2
        b.kill(0)
        with pytest.raises(EngineError, match=r"http://127.0.0.1:\d+ is down: \w+"):
            await ask(b.engine, PROMPT)


async def test_requests_beyond_the_waiting_limit_are_refused() -> None:
    async with bench(1, max_active=2, max_waiting=3, pause_s=0.01) as b:
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
async def test_a_closed_generator_frees_its_place_and_stops_the_server(stream: bool) -> None:
    async with bench(1, max_active=1, pause_s=0.01) as b:
        limit = None if stream else 40  # without a stream the server goes on to the end
        left = b.engine.generate(PROMPT, Sampling(max_tokens=limit), stream=stream)
        if stream:
            await anext(left)
            await left.aclose()
        else:
            with anyio.move_on_after(0.1):
                await anext(left)
            await left.aclose()
        if stream:
            await until(lambda: b.states[0].engines["model"].active == 0)
            before = b.states[0].sampled
            await anyio.sleep(0.1)
            assert b.states[0].sampled == before < 400
        assert (await ask(b.engine, PROMPT, max_tokens=1)).stop == "length"


async def test_a_canceled_task_still_closes_the_engine() -> None:
    async with bench(1) as b:
        await ask(b.engine, PROMPT, max_tokens=1)
        [session] = b.engine._http._sessions.values()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await b.engine.close()
        assert session.closed


async def test_tokens_sampled_while_the_reader_waits_are_one_chunk() -> None:
    async with bench(1, pause_s=0.01) as b:
        before = b.states[0].sampled
        chunks = b.engine.generate(PROMPT, Sampling(max_tokens=30), stream=True)
        taken = len((await anext(chunks)).tokens)
        await until(lambda: b.states[0].sampled == before + 29)  # it does not count the first
        await anyio.sleep(0.1)  # for what is on its way
        [rest] = [chunk async for chunk in chunks]
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
        assert b.states[0].unloaded == [], "a request still samples from it"
        rest = [chunk async for chunk in early]
        assert {v for chunk in (first, *rest) for v in chunk.versions} == {1}
        assert late.versions == (2, 2, 2)
        await b.engine.load(adapter(3))
        assert b.states[0].unloaded == ["v1", "v2"]
        assert set(b.states[0].engines) == {"model", "v3"}


async def test_full_weights_wait_for_active_requests_and_hold_back_new_ones() -> None:
    async with bench(2, pause_s=0.005) as b:
        async with anyio.create_task_group() as tasks:
            early = b.engine.generate(PROMPT, Sampling(max_tokens=30), stream=True)
            versions = set((await anext(early)).versions)
            weights = WeightsSpec(1, "full", Path("/weights/1"))
            tasks.start_soon(b.engine.load, weights)
            await anyio.sleep(0.02)
            assert [state.loaded for state in b.states] == [[], []]
            async for chunk in early:
                versions |= set(chunk.versions)
            late = await ask(b.engine, PROMPT, max_tokens=2)
            assert versions == {0}
            assert late.versions == (1, 1)
        assert [state.loaded for state in b.states] == [["/weights/1"], ["/weights/1"]]


async def test_full_weights_hold_requests_back_from_the_moment_they_load() -> None:
    async with bench(1) as b, anyio.create_task_group() as tasks:
        early = await b.engine._replicas.acquire("", wait_timeout_s=1)
        tasks.start_soon(b.engine.load, FULL)
        await anyio.lowlevel.checkpoint()  # the thread that waits may not run yet
        tasks.start_soon(partial(ask, b.engine, PROMPT, max_tokens=1))
        await anyio.lowlevel.checkpoint()
        active = b.engine._replicas.active
        b.engine._replicas.release(early)
        assert active == 1


async def test_full_weights_that_are_given_up_let_requests_go_on() -> None:
    async with bench(1, pause_s=0.01) as b:
        early = b.engine.generate(PROMPT, Sampling(max_tokens=40), stream=True)
        await anext(early)
        with anyio.move_on_after(0.05):
            await b.engine.load(FULL)
        assert (await ask(b.engine, PROMPT, max_tokens=2)).versions == (0, 0)
        await early.aclose()
        await b.engine.load(FULL)
        assert (await ask(b.engine, PROMPT, max_tokens=2)).versions == (7, 7)


@pytest.mark.parametrize(
    ("lacking", "weights", "message"),
    [
        ("loads_adapters", adapter(1), "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA"),
        ("loads_weights", WeightsSpec(1, "full", Path("/w")), "VLLM_SERVER_DEV_MODE=1"),
    ],
)
async def test_a_server_that_does_not_load_weights_is_a_one_line_error(
    lacking: str, weights: WeightsSpec, message: str
) -> None:
    async with bench(1, "vllm", **{lacking: False}) as b:
        with pytest.raises(EngineError, match=message):
            await b.engine.load(weights)


async def test_a_refused_reset_of_the_prefix_cache_is_retried() -> None:
    async with bench(1, refused_resets=1) as b:
        await b.engine.load(WeightsSpec(1, "full", Path("/w")))
        assert b.states[0].refused_resets < 0


async def test_a_prefix_cache_that_stays_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "RESET_INTERVAL_S", 0.0)
    async with bench(1, refused_resets=10_000) as b:
        with pytest.raises(EngineError, match="does not reset its prefix cache"):
            await b.engine.load(WeightsSpec(1, "full", Path("/w")))


# ------------------------------------------------------------------- stop ids of SGLang


async def greedy_token(engine: RemoteEngine) -> int:
    [token] = (await ask(engine, PROMPT, temperature=0, max_tokens=1)).tokens
    return token


async def test_an_answer_of_sglang_ends_at_its_stop_id() -> None:
    server = serve(sglang_app, ServerState(decode, VOCABULARY, CONTEXT))
    try:
        engine = await connect_servers(
            "sglang", [server.url], decode, context_length=CONTEXT, progress=print
        )
        token = await greedy_token(engine)
        chunk = await ask(engine, PROMPT, temperature=0, max_tokens=50, stop_ids=(token,))
        assert (chunk.tokens, chunk.stop) == ((token,), "stop")
        await engine.close()
    finally:
        server.close()


async def test_an_answer_is_cut_at_its_stop_id_whatever_the_server_does() -> None:
    state = ServerState(decode, VOCABULARY, CONTEXT)
    server = serve(sglang_app, state)
    try:
        engine = await connect_servers(
            "sglang", [server.url], decode, context_length=CONTEXT, progress=print
        )
        token = await greedy_token(engine)
        state.ignores_stop_ids = True
        chunk = await ask(engine, PROMPT, temperature=0, max_tokens=50, stop_ids=(token,))
        assert (chunk.tokens, chunk.stop) == ((token,), "stop")
        assert len(chunk.logprobs) == len(chunk.versions) == 1
        await engine.close()
    finally:
        server.close()


async def test_an_sglang_that_ignores_stop_ids_is_refused() -> None:
    server = serve(sglang_app, ServerState(decode, VOCABULARY, CONTEXT, ignores_stop_ids=True))
    try:
        with pytest.raises(ConfigError, match="does not stop at stop_token_ids: found 4 tokens"):
            await connect_servers(
                "sglang", [server.url], decode, context_length=CONTEXT, progress=print
            )
    finally:
        server.close()


async def test_an_sglang_with_log_probs_before_the_temperature_samples_at_temperature_1() -> None:
    server = serve(sglang_app, ServerState(decode, VOCABULARY, CONTEXT, original_logprobs=True))
    notes: list[str] = []
    try:
        engine = await connect_servers(
            "sglang", [server.url], decode, context_length=CONTEXT, progress=notes.append
        )
        assert any("before the temperature" in note for note in notes)
        for temperature in (0.0, 1.0):
            sampling = Sampling(temperature=temperature, max_tokens=2)
            assert [chunk async for chunk in engine.generate([1, 2], sampling)]
        with pytest.raises(RequestError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
            await anext(engine.generate([1, 2], Sampling(temperature=0.5, max_tokens=2)))
        await engine.close()
    finally:
        server.close()


# ------------------------------------------------------------------- what a version lacks


async def connect_error(app: Callable[[ServerState], Starlette] = vllm_app, **settings: Any) -> str:
    """The error of connecting to such a server."""
    server = serve(app, ServerState(decode, VOCABULARY, CONTEXT, **settings))
    try:
        with pytest.raises(ConfigError) as raised:
            await connect_servers(
                "vllm", [server.url], decode, context_length=CONTEXT, progress=print
            )
    finally:
        server.close()
    return str(raised.value)


async def test_a_vllm_without_token_ids_is_too_old() -> None:
    message = await connect_error(returns_ids=False)
    assert "vLLM 0.9.1" in message
    assert "is missing" in message
    assert "use 0.10.2 or newer" in message


async def test_another_server_is_not_vllm() -> None:
    assert "there is no vLLM at http://127.0.0.1" in await connect_error(sglang_app)


async def test_servers_that_differ_are_refused() -> None:
    states = [ServerState(decode, VOCABULARY, context) for context in (CONTEXT, 256)]
    servers = [serve(vllm_app, state) for state in states]
    urls = [server.url for server in servers]
    with pytest.raises(ConfigError, match=r"differ \(context_length\)"):
        await connect_servers("vllm", urls, decode, context_length=CONTEXT, progress=print)
    for server in servers:
        server.close()


async def test_raw_logprobs_are_used_only_where_they_are_those_of_the_sample() -> None:
    async with bench(1, processed=False) as b:
        assert (await ask(b.engine, PROMPT, max_tokens=2)).stop == "length"
        assert (await ask(b.engine, PROMPT, max_tokens=2, temperature=0)).stop == "length"
        shapes: list[Any] = [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}]
        for shaped in shapes:
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
