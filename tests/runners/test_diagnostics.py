"""Misconfigurations that silently spoil training are reported once and kept in the store."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import ModuleType

import anyio
import pytest
from pydantic import JsonValue

from support.agents.run_agents import FixedEndpoint
from support.store.trajectories import Conversation, generation
from whet.config import RunnerConfig
from whet.io.genai_spans import REFUSED_CALL
from whet.runners.diagnostics import (
    MAX_CHECKED,
    MAX_REWARD_KINDS,
    Diagnostics,
    find_fixed_sampling,
    find_known_pitfalls,
    read_warnings,
)
from whet.runners.runner import Runner
from whet.store.sqlite import SQLiteStore
from whet.types import (
    Attempt,
    Endpoint,
    Failure,
    FailureKind,
    Mode,
    Outcome,
    Reward,
    Rollout,
    Sampling,
    SamplingOverride,
    Span,
)

pytestmark = pytest.mark.anyio

OPENAI = {"openai": ModuleType("openai")}
ENDED = Outcome(reward=1.0)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SQLiteStore]:
    async with SQLiteStore(tmp_path / "store.db") as store:
        yield store


class EndedAttempts:
    """Ends attempts with a number of calls, and collects the warnings about them."""

    def __init__(self, store: SQLiteStore, modules: dict[str, ModuleType], **environ: str) -> None:
        self.warnings: list[str] = []
        self._store = store
        self._diagnostics = Diagnostics(
            store, "worker", self.warnings.append, modules=modules, environ=environ
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
        await self._diagnostics.check(attempt, outcome)
        await self._store.finish(attempt.id, outcome)


def failed(message: str) -> Outcome:
    return Outcome(failure=Failure(kind=FailureKind.AGENT, message=message))


async def test_rollouts_that_call_their_model_give_no_warning(store: SQLiteStore) -> None:
    runner = EndedAttempts(store, OPENAI)
    await runner.ends("a", 2)
    assert not runner.warnings
    assert not await read_warnings(store)


async def test_the_first_failure_is_reported_once(store: SQLiteStore) -> None:
    runner = EndedAttempts(store, OPENAI)
    await runner.ends("a", 1, failed("the agent raised: KeyError: 'x' (a.py:3)"))
    await runner.ends("b", 1, failed("the agent raised: KeyError: 'y' (a.py:3)"))
    assert runner.warnings == [
        "warning: rollout a failed: the agent raised: KeyError: 'x' (a.py:3)"
    ]


async def test_a_rollout_without_a_model_call_is_reported_once_and_kept(store: SQLiteStore) -> None:
    runner = EndedAttempts(store, {})
    await runner.ends("a", 0)
    await runner.ends("b", 0)
    [line] = runner.warnings
    assert line.startswith("warning: rollout a made no model call")
    assert "llm.base_url" in line
    [kept] = (await read_warnings(store)).values()
    assert kept.startswith("warning of runner worker: rollout a made no model call")


async def test_a_base_url_that_did_not_take_effect_is_reported(store: SQLiteStore) -> None:
    runner = EndedAttempts(store, OPENAI)
    await runner.ends("a", 0)
    [line] = runner.warnings
    assert "'openai' is loaded: its base URL did not take effect" in line
    assert "base_url=llm.base_url" in line


async def test_a_client_that_another_server_rejected_is_reported(store: SQLiteStore) -> None:
    runner = EndedAttempts(store, OPENAI)
    await runner.ends("a", 0, failed("the agent raised: KeyError: 'question'"))
    await runner.ends("b", 0, failed("the agent raised: AuthenticationError: Error code: 401"))
    [_, line] = runner.warnings
    assert "rollout b failed and the gateway served none of its calls" in line
    assert "does 'openai' use another server or key? give its client base_url" in line


async def test_only_spans_that_name_reply_and_server_show_that_calls_bypassed_the_gateway(
    store: SQLiteStore,
) -> None:
    def calling(number: int, **attributes: JsonValue) -> Span:
        chat: dict[str, JsonValue] = {"gen_ai.operation.name": "chat"}
        return Span(
            trace_id="0" * 32, span_id=f"{number:016x}", name=f"chat {number}", start=1, end=2,
            attributes=chat | attributes,
        )  # fmt: skip

    def replied(number: int, id: str, server: str) -> Span:
        return calling(number, **{"gen_ai.response.id": id, "server.address": server})

    runner = EndedAttempts(store, OPENAI)
    own = replied(1, "chatcmpl-a.1.c0", "127.0.0.1")
    unnamed = calling(2, **{"server.address": "api.openai.com"})
    unplaced = calling(3, **{"gen_ai.response.id": "chatcmpl-x"})
    lost = replied(4, "chatcmpl-y", "127.0.0.1")  # its stream was left
    await runner.ends("a", 1, spans=[own, unnamed, unplaced, lost])
    assert not runner.warnings
    own = replied(1, "chatcmpl-b.1.c0", "127.0.0.1")
    await runner.ends("b", 1, spans=[own, replied(5, "chatcmpl-z", "api.openai.com")])
    [line] = runner.warnings
    assert "rollout b made only some of its model calls at the gateway: call 'chat 5'" in line
    assert "went to api.openai.com" in line


async def test_a_call_to_another_server_without_token_ids_is_reported(store: SQLiteStore) -> None:
    runner = EndedAttempts(store, OPENAI)
    span = Span(
        trace_id="0" * 32, span_id="1" * 16, name="chat gpt", start=1, end=2,
        attributes={"gen_ai.operation.name": "chat", "server.address": "api.openai.com"},
    )  # fmt: skip
    await runner.ends("a", calls=0, spans=[span])
    await runner.ends(
        "b", calls=1, spans=[span]
    )  # an instrumented client of ours has the same span
    [line] = runner.warnings
    assert "call 'chat gpt' (span 1111111111111111 of attempt" in line
    assert "went to api.openai.com" in line
    assert "base_url=llm.base_url" in line


@pytest.mark.parametrize("earlier", [[], [failed("KeyError")]])
async def test_a_refusal_that_the_first_failure_has_as_its_reason_is_not_reported_again(
    store: SQLiteStore, earlier: list[Outcome]
) -> None:
    runner = EndedAttempts(store, {})
    span = Span(
        trace_id="0" * 32, span_id="1" * 16, name=REFUSED_CALL, start=1, end=2, message="too long"
    )  # fmt: skip
    for outcome in earlier:
        await runner.ends("first", 1, outcome)
    for rollout in "ab":
        await runner.ends(rollout, 0, failed("the agent raised: 400 - too long"), spans=[span])
    assert len(runner.warnings) == 1 + len(earlier)
    assert "too long" in runner.warnings[-1]


async def test_a_refusal_in_a_failure_that_is_not_reported_is_reported_by_itself(
    store: SQLiteStore,
) -> None:
    runner = EndedAttempts(store, {})
    span = Span(
        trace_id="0" * 32, span_id="1" * 16, name=REFUSED_CALL, start=1, end=2, message="too long"
    )  # fmt: skip
    lost = Failure(kind=FailureKind.MODEL_LOST, message="the agent raised: 400 - too long")
    await runner.ends("a", 0, Outcome(failure=lost), spans=[span])
    [line] = runner.warnings
    assert line.endswith("refused the model calls of rollout a: too long")


async def test_unread_rewards_are_reported_by_their_kind_whichever_runner_finds_them(
    store: SQLiteStore,
) -> None:
    async def explain_unread(reward: Reward) -> str:
        return f"unknown key {reward.key!r}"

    reported: list[str] = []
    for keys in (["a", "b"], ["c", "a"], [f"task-{n}" for n in range(2 * MAX_REWARD_KINDS)]):
        runner = Diagnostics(store, "worker", reported.append, explain_unread, {}, {})
        await store.enqueue([Rollout(id=f"r-{keys[0]}", task=0, group="g")])
        attempt = await store.claim("worker", lease_s=30, wait_s=1)
        assert attempt is not None
        rewards = {Reward(value=1.0, key=key): "agent.py:3" for key in keys}
        await runner.check(attempt, ENDED, rewards)
    kept = " ".join((await read_warnings(store)).values())
    assert all(f"unknown key '{key}'" in kept for key in "abc")
    assert sum("key 'task-" in line for line in reported) == MAX_REWARD_KINDS


async def test_a_rollout_that_was_answered_from_a_cache_is_reported(store: SQLiteStore) -> None:
    runner = EndedAttempts(store, OPENAI)
    await runner.ends("a", 2)
    await runner.ends("b", 0)
    [line] = runner.warnings
    assert "rollout b made no model call, but others of its group did" in line
    assert "cache" in line


async def test_only_the_first_attempts_are_checked(store: SQLiteStore) -> None:
    runner = EndedAttempts(store, {})
    for number in range(MAX_CHECKED):
        await runner.ends(f"r{number}", 1)
    await runner.ends("late", 0)
    assert not runner.warnings


async def test_telemetry_is_reported_with_the_variable_to_set() -> None:
    modules = {"crewai": ModuleType("crewai")}
    assert "CREWAI_DISABLE_TELEMETRY=true" in find_known_pitfalls(modules, {})["crewai-telemetry"]
    assert not find_known_pitfalls(modules, {"CREWAI_DISABLE_TELEMETRY": "true"})
    assert not find_known_pitfalls({"agents.tracing": ModuleType("a user's own agents")}, {})


async def test_a_runner_checks_its_attempts(store: SQLiteStore) -> None:
    def idle(task: object, llm: Endpoint) -> float:
        return 1.0

    def endpoint(attempt: Attempt) -> Endpoint:
        return Endpoint(base_url="http://nowhere", api_key="key", model="policy")

    warnings: list[str] = []
    runner = Runner(
        idle,
        RunnerConfig(),
        store=store,
        endpoints=FixedEndpoint(endpoint),
        on_warning=warnings.append,
    )
    await store.enqueue([Rollout(id=id, task=0, group="g") for id in "ab"])
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runner.run)
            await store.wait(["a", "b"])
            runner.drain(30)
    assert len(warnings) == 1
    assert (
        "none of its calls reached the gateway" in warnings[0]
        or "made no model call" in warnings[0]
    )


@pytest.mark.parametrize(
    ("sampling", "forced", "mode", "name"),
    [
        (Sampling(temperature=0), None, Mode.TRAIN, "temperature"),
        (Sampling(temperature=0), 0.0, Mode.TRAIN, None),  # the run wants it, as `greedy` does
        (Sampling(temperature=0), None, Mode.VAL, None),
        (Sampling(seed=7), None, Mode.TRAIN, "seed"),
        (Sampling(seed=7), None, Mode.VAL, None),
        (Sampling(temperature=0.7), None, Mode.TRAIN, None),
    ],
)
def test_seeds_and_temperature_0_of_an_agent_are_named_in_training(
    sampling: Sampling, forced: float | None, mode: Mode, name: str | None
) -> None:
    conversation = Conversation("r")
    conversation.call([1], generation([5], sampling=sampling))
    override = SamplingOverride(temperature=forced)
    rollout = Rollout(id="r", task=0, group="g", mode=mode, sampling=override)
    found = find_fixed_sampling(rollout, conversation.calls)
    assert list(found) == ([name] if name else [])
    assert all("rollout r" in text for text in found.values())
