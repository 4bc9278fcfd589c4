"""The runner: agents of all kinds, their rewards, failures and limits."""

import math
import threading
import time
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

import whet
from support.agents.cross_thread import Count, Flag
from support.agents.run_agents import FixedEndpoint, endpoint, get_failure, run
from support.store.records import call
from whet.config import RunnerConfig
from whet.errors import ConfigError
from whet.io.genai_spans import build_refusal
from whet.runners.runner import RELEASED, Runner
from whet.store.sqlite import SQLiteStore
from whet.types import Attempt, AttemptId, CallId, Endpoint, FailureKind, Rollout, Status, Target

pytestmark = pytest.mark.anyio


async def test_async_and_sync_agents_give_their_reward(store: SQLiteStore) -> None:
    async def one(task: float, llm: Endpoint) -> float:
        return task

    groups = await run(one, [0.25, 1], store)
    assert [group[0].reward for group in groups] == [0.25, 1.0]


async def test_a_sync_agent_runs_beside_the_loop(store: SQLiteStore) -> None:
    threads: list[int] = []

    def one(task: object, llm: Endpoint) -> bool:
        threads.append(threading.get_ident())
        return llm.base_url.endswith("r0.1")

    groups = await run(one, ["t"], store)
    assert groups[0][0].reward == 1.0
    assert threads != [threading.get_ident()]


async def test_an_object_with_an_async_call_is_an_agent(store: SQLiteStore) -> None:
    class Solver:
        async def __call__(self, task: object, llm: Endpoint) -> float:
            return 0.5

    assert (await run(Solver(), ["t"], store))[0][0].reward == 0.5


async def test_many_attempts_run_at_once(store: SQLiteStore) -> None:
    arrived, all_arrived = 0, Flag()

    async def one(task: object, llm: Endpoint) -> float:
        nonlocal arrived
        arrived += 1
        if arrived == 32:
            all_arrived.set()
        await all_arrived.wait()
        return 1.0

    assert len(await run(one, list(range(32)), store)) == 32


class ClaimCounter(SQLiteStore):
    """Counts claims: how many there were, and how many at once."""

    total = open = most = 0

    async def claim(self, worker: str, *, lease_s: float, wait_s: float) -> Attempt | None:
        self.total += 1
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            return await super().claim(worker, lease_s=lease_s, wait_s=wait_s)
        finally:
            self.open -= 1


async def test_an_idle_runner_waits_with_one_claim_and_a_busy_one_makes_many(
    tmp_path: Path,
) -> None:
    async with ClaimCounter(tmp_path / "store.db") as store:
        runner = Runner(
            lambda task: 1.0,
            RunnerConfig(concurrency=64),
            store=store,
            endpoints=FixedEndpoint(endpoint),
        )
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(runner.run)
                while not await store.workers():
                    await anyio.lowlevel.checkpoint()
                assert (store.total, store.most) == (1, 1)
                ids = [f"r{n}" for n in range(64)]
                await store.enqueue([Rollout(id=id, task="a", group=id) for id in ids])
                await store.wait(ids)
                assert store.most > 8
                assert store.total < 64 + 64
                tasks.cancel_scope.cancel()


async def test_an_attempt_that_outlives_its_dropped_run_does_not_end_the_runner(
    tmp_path: Path,
) -> None:
    began, renewed, is_dropped = Flag(), Flag(), False

    class Renewed(SQLiteStore):
        async def heartbeat(self, attempt: AttemptId, *, lease_s: float) -> None:
            try:
                await super().heartbeat(attempt, lease_s=lease_s)
            finally:
                if is_dropped:
                    renewed.set()

    async def one(task: str) -> float:
        began.set()
        try:
            await Flag().wait()
        finally:  # it cleans up while its lease is renewed
            await renewed.wait()
        return 1.0

    async with Renewed(tmp_path / "store.db") as store:
        config = RunnerConfig(lease_s=1)
        runner = Runner(one, config, store=store, endpoints=FixedEndpoint(endpoint))
        await store.enqueue([Rollout(id="a", task="a", group="a")])
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(runner.run)
                await began.wait()
                await store.cancel(["a"])
                await store.drop()
                is_dropped = True
                await renewed.wait()
                await store.enqueue([Rollout(id="b", task="b", group="b")])
                while not (await store.counts())["attempts"]:
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()


async def test_the_last_emitted_reward_counts_where_none_is_returned(store: SQLiteStore) -> None:
    async def one(task: object, llm: Endpoint) -> None:
        whet.emit_reward(0.1)
        whet.emit_reward(0.7)
        whet.emit_reward(5.0, key="length")

    trajectory = (await run(one, ["t"], store))[0][0]
    assert trajectory.reward == 0.7
    assert [(r.key, r.value) for r in trajectory.rewards] == [
        ("reward", 0.1),
        ("reward", 0.7),
        ("length", 5.0),
    ]


async def test_a_reward_may_be_for_a_part_and_then_is_not_the_attempts(store: SQLiteStore) -> None:
    async def one(task: object, llm: Endpoint) -> None:
        whet.emit_reward(0.5)
        whet.emit_reward(1.0, turn=0)
        whet.emit_reward(2.0, call="chatcmpl-abc", agent="solver")

    trajectory = (await run(one, ["t"], store))[0][0]
    assert trajectory.reward == 0.5
    assert [reward.target for reward in trajectory.rewards] == [
        None,
        Target(turn=0),
        Target(call=CallId("abc"), agent="solver"),
    ]


async def test_a_turn_before_the_first_is_no_turn(store: SQLiteStore) -> None:
    async def one(task: object, llm: Endpoint) -> float:
        whet.emit_reward(1.0, turn=-1)
        return 1.0

    await run(one, ["t"], store)
    failures = await store.failures(["r0"])
    assert failures == {"r0": "bad_reward: turns are counted from 0; found a reward for turn -1"}


async def test_a_reward_whose_key_cannot_be_stored_fails_its_attempt_alone(
    store: SQLiteStore,
) -> None:
    async def one(task: str, llm: Endpoint) -> float:
        whet.emit_reward(1.0, key=task)
        return 1.0

    await run(one, ["\udcff", "words"], store)
    failures = await store.failures(["r0", "r1"])
    assert failures == {"r0": "bad_reward: the key of a reward is UTF-8 text; found '\\udcff'"}


async def test_an_agent_may_emit_and_fail_where_its_working_folder_is_gone(
    store: SQLiteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()

    def one(task: float, llm: Endpoint) -> None:
        whet.emit_reward(task)
        if task < 0:
            raise LookupError("no word")

    [[trajectory], []] = await run(one, [1.0, -1.0], store)
    assert trajectory.reward == 1.0
    [failure] = (await store.failures(["r1"])).values()
    assert failure.startswith(f"agent: the agent raised: LookupError: no word ({__file__}:")


async def test_rewards_emitted_in_a_thread_find_their_attempt(store: SQLiteStore) -> None:
    def one(task: float, llm: Endpoint) -> None:
        whet.emit_reward(task)

    groups = await run(one, [0.0, 1.0, 2.0, 3.0], store)
    assert [group[0].reward for group in groups] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (math.nan, "finite number; found nan"),
        (math.inf, "finite number; found inf"),
        (10**400, "finite number; found inf"),
        ("1.0", "found str '1.0'"),
        ([1.0], "found list [1.0]"),
        ((1.0, "why"), "other values to whet.emit_reward(value, key=...)"),
        (None, "no reward: return a number"),
    ],
)
async def test_a_reward_that_is_no_number_fails_the_rollout(
    store: SQLiteStore, reward: object, says: str
) -> None:
    async def one(task: object, llm: Endpoint) -> object:
        return reward

    reason = await get_failure(one, store, tries=3)
    assert reason.startswith("bad_reward: ")
    assert says in reason
    assert (await store.counts())["attempts"] == 1


async def test_an_agent_that_emits_only_other_keys_is_told_which(store: SQLiteStore) -> None:
    async def one(task: object, llm: Endpoint) -> None:
        whet.emit_reward(0.5, key="style")
        whet.emit_reward(1.0, key="judge.calls")

    reason = await get_failure(one, store)
    assert (
        "bad_reward: no reward, only 'style': return a number, or call whet.emit_reward" in reason
    )


async def test_an_agent_that_raises_fails_its_rollout_and_the_others_go_on(
    store: SQLiteStore,
) -> None:
    async def one(task: int, llm: Endpoint) -> float:
        if task == 1:
            raise KeyError("gone")
        return 1.0

    groups = await run(one, [0, 1, 2], store)
    assert [len(group) for group in groups] == [1, 0, 1]
    failure = (await store.failures(["r1"]))["r1"]
    assert failure.startswith("agent: the agent raised: KeyError: 'gone' (")
    assert "test_runner.py:" in failure


async def test_an_agent_that_raises_is_tried_again(store: SQLiteStore) -> None:
    tries: list[object] = []

    async def one(task: object, llm: Endpoint) -> float:
        tries.append(task)
        if len(tries) == 1:
            raise OSError("flaky")
        return 1.0

    groups = await run(one, ["t"], store, tries=2)
    assert groups[0][0].attempt.number == 2


async def test_an_attempt_that_outlives_its_limit_is_stopped(store: SQLiteStore) -> None:
    stopped = False

    async def one(task: object, llm: Endpoint) -> None:
        nonlocal stopped
        try:
            await anyio.sleep_forever()
        finally:
            stopped = True

    reason = await get_failure(one, store, timeout_s=0.1)
    assert reason == "timeout: the attempt ran longer than 0.1 s"
    assert stopped


async def enqueue(store: SQLiteStore, *ids: str, tries: int = 1) -> None:
    await store.enqueue([Rollout(id=id, group=id, task=id, max_attempts=tries) for id in ids])


async def test_a_cancel_reaches_the_agent_at_once(store: SQLiteStore) -> None:
    begun, stopped = Flag(), Flag()

    async def one(task: object, llm: Endpoint) -> None:
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            stopped.set()

    runner = Runner(one, RunnerConfig(), store=store, endpoints=FixedEndpoint(endpoint))
    await enqueue(store, "a")
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tg:
            tg.start_soon(runner.run)
            await begun.wait()
            start = anyio.current_time()
            await store.cancel(["a"])
            await stopped.wait()
            assert anyio.current_time() - start < 1
            tg.cancel_scope.cancel()
    (attempt,) = await store.attempts("a")
    assert attempt.failure is not None
    assert attempt.failure.kind is FailureKind.CANCELED
    assert attempt.late == ()


async def test_a_sync_agent_that_was_canceled_is_left_alone(store: SQLiteStore) -> None:
    begun, let_go = threading.Event(), threading.Event()

    def one(task: str, llm: Endpoint) -> float:
        if task == "a":
            begun.set()
            let_go.wait(30)
        return 1.0

    config = RunnerConfig(concurrency=1)
    runner = Runner(one, config, store=store, endpoints=FixedEndpoint(endpoint))
    await enqueue(store, "a", "b")
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tg:
            tg.start_soon(runner.run)
            await anyio.to_thread.run_sync(begun.wait)
            await store.cancel(["a"])
            await store.wait(["b"])  # its place is free though the thread still runs
            let_go.set()
            tg.cancel_scope.cancel()
    assert await store.failures(["a", "b"]) == {"a": "canceled: canceled on request"}


async def test_a_runner_that_leaves_lets_short_attempts_end_and_hands_back_the_rest(
    store: SQLiteStore,
) -> None:
    both, may_end = Count(), Flag()

    async def one(task: str, llm: Endpoint) -> float:
        both.release()
        await (may_end.wait() if task == "short" else anyio.sleep_forever())
        return 1.0

    runner = Runner(one, RunnerConfig(), store=store, endpoints=FixedEndpoint(endpoint))
    await enqueue(store, "short", "long")
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tg:
            tg.start_soon(runner.run)
            await both.acquire()
            await both.acquire()
            runner.drain(grace_s=0.5)
            await enqueue(store, "later")
            may_end.set()
            await store.wait(["short"])
    # The runner has returned by itself, and what it did not end is there at once, untried.
    claimed = [await store.claim("other", lease_s=60, wait_s=0) for _ in range(3)]
    assert [c and c.id for c in claimed] == ["long.2", "later.1", None]
    assert (await store.attempts("long"))[0].failure == RELEASED.failure


async def test_a_runner_restarted_under_its_name_returns_what_it_ran_when_it_was_killed(
    store: SQLiteStore,
) -> None:
    async def one(task: object, llm: Endpoint) -> float:
        return 1.0

    await enqueue(store, "a", "other")
    for worker in ("mine", "another"):
        await store.claim(worker, lease_s=3600, wait_s=0)
    runner = Runner(
        one, RunnerConfig(), store=store, endpoints=FixedEndpoint(endpoint), name="mine"
    )
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tg:
            tg.start_soon(runner.run)
            await store.wait(["a"])
            tg.cancel_scope.cancel()
    assert [attempt.worker for attempt in await store.attempts("a")] == ["mine", "mine"]
    assert (await store.attempts("other"))[0].status is Status.RUNNING


async def test_an_agents_own_timeout_error_is_its_failure(store: SQLiteStore) -> None:
    async def one(task: object, llm: Endpoint) -> float:
        raise TimeoutError("the tool was slow")

    assert (await get_failure(one, store)).startswith("agent: the agent raised: TimeoutError")


def test_rewards_cannot_be_emitted_outside_an_attempt() -> None:
    with pytest.raises(ConfigError, match="inside an agent"):
        whet.emit_reward(1.0)


@pytest.mark.parametrize(
    "error",
    [
        "Error code: 400 - {'error': {'code': 'context_length_exceeded'}}",
        "the prompt has 600000 characters; this model's context holds 511 tokens",
        "This model's maximum context length is 511 tokens; the prompt has 600 tokens",
    ],
)
async def test_a_prompt_that_is_too_long_is_a_failure_of_its_own_kind(
    store: SQLiteStore, error: str
) -> None:
    async def one(task: object, llm: Endpoint) -> float:
        raise ValueError(error)

    assert (await get_failure(one, store)).startswith("context_length: ")


@pytest.mark.parametrize(("goes_on", "kind"), [(False, "context_length: "), (True, "agent: ")])
async def test_an_agent_that_hides_the_gateways_message_of_a_full_context_fails_for_it(
    store: SQLiteStore, goes_on: bool, kind: str
) -> None:
    async def one(task: object, llm: Endpoint) -> float:
        [attempt] = await store.attempts("r0")
        refused = "This model's maximum context length is 511 tokens; the prompt has 600 tokens"
        await store.record(attempt.id, [build_refusal(attempt.id, refused, time.time_ns())])
        if goes_on:
            later = {"created": time.time() + 1}
            await store.append(call(attempt.id, "c").model_copy(update=later))
        raise IndexError("no choices")

    assert (await get_failure(one, store)).startswith(kind)
