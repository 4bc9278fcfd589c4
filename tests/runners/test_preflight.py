"""What would silently spoil training is said once, in one line, and kept in the store."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import ModuleType

import anyio
import pytest

from trajectories import Conversation, generation
from whet.config import RunnerConfig
from whet.runners.gateways import OwnGateway
from whet.runners.local import LocalRunner
from whet.runners.preflight import LOOKS, Preflight, spoilers, warnings_in
from whet.store.sqlite import SQLiteStore
from whet.types import Attempt, Endpoint, Failure, FailureKind, Outcome, Rollout, Span

pytestmark = pytest.mark.anyio

OPENAI = {"openai": ModuleType("openai")}
ENDED = Outcome(reward=1.0)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SQLiteStore]:
    async with SQLiteStore(tmp_path / "store.db") as store:
        yield store


class Runner:
    """Ends attempts that made so many calls, and hears what is said of them."""

    def __init__(self, store: SQLiteStore, modules: dict[str, ModuleType], **environ: str) -> None:
        self.said: list[str] = []
        self._store = store
        self._preflight = Preflight(
            store, "worker", self.said.append, modules=modules, environ=environ
        )

    async def ends(
        self,
        rollout: str,
        calls: int,
        outcome: Outcome = ENDED,
        group: str = "g",
        spans: Sequence[Span] = (),
    ) -> None:
        await self._store.enqueue([Rollout(id=rollout, task=0, group=group, max_attempts=1)])
        attempt = await self._store.claim("worker", lease_s=30, wait_s=1)
        assert attempt is not None
        conversation = Conversation(rollout)
        for number in range(calls):
            conversation.call([number], generation([5]))
        for call in conversation.calls:
            await self._store.append(call)
        await self._store.record(attempt.id, spans)
        await self._preflight.look(attempt, outcome)
        await self._store.finish(attempt.id, outcome)


def failed(message: str) -> Outcome:
    return Outcome(failure=Failure(kind=FailureKind.AGENT, message=message))


async def test_nothing_is_said_of_rollouts_that_ask_their_model(store: SQLiteStore) -> None:
    runner = Runner(store, OPENAI)
    await runner.ends("a", 2)
    await runner.ends("b", 1, failed("the agent raised: KeyError: 'x'"))
    assert not runner.said
    assert not await warnings_in(store)


async def test_a_rollout_without_a_model_call_is_told_once_and_kept(store: SQLiteStore) -> None:
    runner = Runner(store, {})
    await runner.ends("a", 0)
    await runner.ends("b", 0)
    [line] = runner.said
    assert line.startswith("warning: rollout a made no model call")
    assert "llm.base_url" in line
    [kept] = (await warnings_in(store)).values()
    assert kept.startswith("warning of runner worker: rollout a made no model call")


async def test_a_base_url_that_did_not_take_effect_is_told(store: SQLiteStore) -> None:
    runner = Runner(store, OPENAI)
    await runner.ends("a", 0)
    [line] = runner.said
    assert "'openai' is loaded: its base URL did not take effect" in line
    assert "base_url=llm.base_url" in line


async def test_a_client_that_another_server_turned_away_is_told(store: SQLiteStore) -> None:
    runner = Runner(store, OPENAI)
    await runner.ends("a", 0, failed("the agent raised: KeyError: 'question'"))
    assert not runner.said
    await runner.ends("b", 0, failed("the agent raised: AuthenticationError: Error code: 401"))
    [line] = runner.said
    assert "rollout b failed and none of its calls came here" in line
    assert "is 'openai' asking another server?" in line


async def test_a_call_to_another_server_without_its_tokens_is_told(store: SQLiteStore) -> None:
    runner = Runner(store, OPENAI)
    span = Span(
        trace_id="0" * 32, span_id="1" * 16, name="chat gpt", start=1, end=2,
        attributes={"gen_ai.operation.name": "chat", "server.address": "api.openai.com"},
    )  # fmt: skip
    await runner.ends("a", calls=0, spans=[span])
    await runner.ends("b", calls=1, spans=[span])  # an instrumented client of ours tells the same
    [said] = runner.said
    assert "call 'chat gpt' (span 1111111111111111 of attempt" in said
    assert "asked api.openai.com" in said
    assert "base_url=llm.base_url" in said


async def test_a_rollout_that_was_answered_from_a_cache_is_told(store: SQLiteStore) -> None:
    runner = Runner(store, OPENAI)
    await runner.ends("a", 2)
    await runner.ends("b", 0)
    [line] = runner.said
    assert "rollout b made no model call, but others of its group did" in line
    assert "cache" in line


async def test_only_the_first_attempts_are_looked_at(store: SQLiteStore) -> None:
    runner = Runner(store, {})
    for number in range(LOOKS):
        await runner.ends(f"r{number}", 1)
    await runner.ends("late", 0)
    assert not runner.said


async def test_telemetry_is_told_with_what_to_set() -> None:
    modules = {"crewai": ModuleType("crewai")}
    assert "CREWAI_DISABLE_TELEMETRY=true" in spoilers(modules, {})["crewai-telemetry"]
    assert not spoilers(modules, {"CREWAI_DISABLE_TELEMETRY": "true"})
    assert not spoilers({"agents.tracing": ModuleType("somebody's own agents")}, {})


async def test_a_runner_looks_at_what_it_ran(store: SQLiteStore) -> None:
    def idle(task: object, llm: Endpoint) -> float:
        return 1.0

    def endpoint(attempt: Attempt) -> Endpoint:
        return Endpoint(base_url="http://nowhere", api_key="key", model="policy")

    said: list[str] = []
    runner = LocalRunner(
        idle, RunnerConfig(), store=store, gateways=OwnGateway(endpoint), on_warning=said.append
    )
    await store.enqueue([Rollout(id=id, task=0, group="g") for id in "ab"])
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runner.run)
            await store.wait(["a", "b"])
            runner.leave(30)
    assert len(said) == 1
    assert "none of its calls came here" in said[0] or "made no model call" in said[0]
