"""Agents that misbehave: the attempt fails with its reason, the others go on, nothing leaks."""

import asyncio
import gc
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

import anyio
import pytest

import whet
from support.agents.run_agents import FixedEndpoint, endpoint, get_failure, run
from whet.config import RunnerConfig
from whet.runners.agent import Agent
from whet.runners.runner import Runner
from whet.store.sqlite import SQLiteStore
from whet.types import Endpoint, FailureKind, Rollout

pytestmark = pytest.mark.anyio


async def hang(task: object) -> None:
    await asyncio.Event().wait()


async def hang_and_ignore_it() -> None:
    until = time.monotonic() + 8
    while time.monotonic() < until:
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue


async def raise_anything(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


async def stop_the_loop() -> None:
    asyncio.get_running_loop().stop()


async def close_the_loop() -> None:
    asyncio.get_running_loop().close()


async def shut_the_threads() -> None:
    await asyncio.get_running_loop().shutdown_default_executor()


async def cancel_everything() -> None:
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(1)


async def exit_from_a_task() -> None:
    await asyncio.create_task(raise_anything(SystemExit(3)))


async def lose_a_task_that_exits() -> None:
    asyncio.create_task(raise_anything(SystemExit(4)))  # noqa: RUF006 - that is the mistake
    await asyncio.sleep(0.05)
    raise LookupError("after it")


MISDEEDS = {
    "exit": (lambda: raise_anything(SystemExit(2)), "agent: the agent raised: SystemExit: 2"),
    "interrupt": (lambda: raise_anything(KeyboardInterrupt()), "raised: KeyboardInterrupt"),
    "base": (lambda: raise_anything(BaseException("odd")), "raised: BaseException: odd"),
    "generator exit": (lambda: raise_anything(GeneratorExit()), "raised: GeneratorExit"),
    "group": (
        lambda: raise_anything(BaseExceptionGroup("many", [SystemExit(1)])),
        "raised: BaseExceptionGroup: many",
    ),
    "canceled": (lambda: raise_anything(asyncio.CancelledError()), "the agent canceled itself"),
    "config error": (lambda: raise_anything(whet.ConfigError("mine")), "raised: ConfigError: mine"),
    "stop": (stop_the_loop, "the agent stops the event loop, which it shares with other attempts"),
    "close": (close_the_loop, "the agent closes the event loop"),
    "threads": (shut_the_threads, "the agent shuts down the threads of the event loop"),
    "cancel all": (cancel_everything, "the agent canceled itself"),
    "task exits": (exit_from_a_task, "the agent raised: SystemExit: 3"),
    "lost task exits": (lose_a_task_that_exits, "the agent raised: LookupError: after it"),
}


@pytest.mark.parametrize("misdeed", MISDEEDS)
async def test_an_async_agents_misdeed_is_its_own_failure_and_the_others_go_on(
    store: SQLiteStore, misdeed: str
) -> None:
    act, says = MISDEEDS[misdeed]

    async def one(task: int) -> float:
        if task == 3:
            await asyncio.sleep(0.05)
            await act()
        else:
            await asyncio.sleep(0.2)
            await asyncio.to_thread(time.sleep, 0.01)
        return 1.0

    groups = await run(one, list(range(12)), store)
    failures = await store.failures([f"r{n}" for n in range(12)])
    assert list(failures) == ["r3"]
    assert says in failures["r3"]
    assert sum(len(group) for group in groups) == 11


@pytest.mark.parametrize(
    "error", [SystemExit(2), KeyboardInterrupt(), BaseException("odd"), StopIteration(7)]
)
async def test_a_sync_agents_misdeed_is_its_own_failure(
    store: SQLiteStore, error: BaseException
) -> None:
    def one(task: int) -> float:
        if task == 1:
            raise error
        return 1.0

    groups = await run(one, [0, 1, 2], store)
    assert [len(group) for group in groups] == [1, 0, 1]
    assert f"the agent raised: {type(error).__name__}" in (await store.failures(["r1"]))["r1"]


async def test_sys_exit_in_a_sync_agent_ends_nothing_else(store: SQLiteStore) -> None:
    failure = await get_failure(lambda task: sys.exit("enough"), store)
    assert failure.startswith("agent: the agent raised: SystemExit: enough (")


async def test_an_agent_that_hangs_is_canceled_at_its_limit(store: SQLiteStore) -> None:
    assert (
        await get_failure(hang, store, timeout_s=0.1)
        == "timeout: the attempt ran longer than 0.1 s"
    )


async def test_an_agent_that_will_not_be_canceled_is_left_behind(store: SQLiteStore) -> None:
    async def one(task: int) -> float:
        if task == 0:
            await hang_and_ignore_it()
        return 1.0

    groups = await run(one, [0, 1], store, timeout_s=0.2)
    assert [len(group) for group in groups] == [0, 1]
    reason = (await store.failures(["r0"]))["r0"]
    assert reason == ("timeout: the attempt ran longer than 0.2 s, and ignores its cancellation")


@pytest.mark.slow
async def test_an_agent_that_blocks_the_loop_fails_alone_and_the_others_run_again(
    store: SQLiteStore,
) -> None:
    let_go, canceled = threading.Event(), threading.Semaphore(0)

    async def one(task: int, rollout: whet.Rollout) -> float:
        if task == 0:
            await asyncio.sleep(0.1)
            let_go.wait(30)  # blocks every other agent of the process
        try:
            await asyncio.sleep(0.3)
        except asyncio.CancelledError:
            canceled.release()
            raise
        return 1.0

    try:
        groups = await run(one, [0, 1, 2], store, timeout_s=1, tries=1)
    finally:
        let_go.set()
    for _ in range(3):  # none of them goes on once it could
        assert await anyio.to_thread.run_sync(canceled.acquire, True, 10)
    assert [len(group) for group in groups] == [0, 1, 1]
    reason = (await store.failures(["r0"]))["r0"]
    assert reason.startswith("timeout: the attempt ran longer than 1 s and blocks its event loop")
    first, second = await store.attempts("r1")
    assert first.failure is not None
    assert first.failure.kind is FailureKind.WORKER_LEFT
    assert second.reward == 1.0


@pytest.mark.slow
async def test_leases_are_kept_while_an_agent_blocks_the_loop(store: SQLiteStore) -> None:
    async def one(task: int) -> float:
        time.sleep(7)  # noqa: ASYNC251 - that is the mistake
        return 1.0

    groups = await run(one, [0], store, lease_s=6)
    assert groups[0][0].attempt.number == 1


# ------------------------------------------------------------------- os.environ


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WHET_TEST_A", "WHET_TEST_URL"):
        monkeypatch.setenv(name, "as it was")


@pytest.mark.usefixtures("environment")
async def test_an_agent_cannot_put_its_endpoint_where_others_find_it(store: SQLiteStore) -> None:
    async def one(task: str, llm: Endpoint) -> float:
        os.environ["WHET_TEST_URL"] = llm.base_url
        return 1.0

    reason = await get_failure(one, store)
    assert "sets os.environ['WHET_TEST_URL'] to its own endpoint" in reason
    assert "pass it to the client instead, or give each attempt a process" in reason
    assert os.environ["WHET_TEST_URL"] == "as it was"


@pytest.mark.usefixtures("environment")
async def test_attempts_may_set_a_variable_to_the_same_value_only(
    store: SQLiteStore, caplog: pytest.LogCaptureFixture
) -> None:
    async def alike(task: int) -> float:
        os.environ["WHET_TEST_A"] = "on"
        return 1.0

    def otherwise(task: int) -> float:
        os.environ["WHET_TEST_A"] = "for all"
        os.environ["WHET_TEST_A"] = f"for {task}"
        return 1.0

    assert all(await run(alike, [0, 1, 2], store))
    warnings = [r.getMessage() for r in caplog.records if "WHET_TEST_A" in r.getMessage()]
    assert len(warnings) == 1
    assert "sets an environment variable for all attempts of this process" in warnings[0]
    assert await run(otherwise, [0], store, prefix="other") == [[]]
    reason = (await store.failures(["other0"]))["other0"]
    assert "sets os.environ['WHET_TEST_A'] to a second value" in reason
    assert os.environ["WHET_TEST_A"] == "for all"


@pytest.mark.usefixtures("environment")
async def test_another_run_in_the_same_process_may_set_another_value(store: SQLiteStore) -> None:
    for value in ("first", "second"):

        def agent(task: int, value: str = value) -> float:
            os.environ["WHET_TEST_A"] = value
            return 1.0

        assert all(await run(agent, [0, 1], store, prefix=value))
        assert os.environ["WHET_TEST_A"] == value


@pytest.mark.usefixtures("environment")
async def test_one_at_a_time_an_agent_has_the_environment_to_itself(store: SQLiteStore) -> None:
    seen: list[str | None] = []

    async def one(task: int, llm: Endpoint) -> float:
        seen.append(os.environ.get("WHET_TEST_URL"))
        os.environ["WHET_TEST_URL"] = llm.base_url
        del os.environ["WHET_TEST_A"]
        os.environ["WHET_TEST_NEW"] = "new"
        return 1.0

    assert all(await run(one, [0, 1], store, concurrency=1))
    assert seen == ["as it was", "as it was"]
    assert os.environ["WHET_TEST_A"] == "as it was"
    assert "WHET_TEST_NEW" not in os.environ


# ------------------------------------------------------------------- leaks


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def misbehave(task: int) -> float | None:
    """Each of ten in its own way, and most leave something behind."""
    match task % 10:
        case 0:
            asyncio.create_task(asyncio.sleep(3600))  # noqa: RUF006 - left behind
        case 1:
            threading.Thread(target=time.sleep, args=(0.01,)).start()
        case 2:
            raise LookupError("no")
        case 3:
            return None
        case 4:
            return math.nan
        case 5:
            await cancel_everything()
        case 6:
            await asyncio.to_thread(time.sleep, 0.001)
        case 7:
            sys.exit(1)
        case 8:
            with whet.operation("work"):
                await asyncio.wait_for(asyncio.sleep(1e-4), 10)
        case _:
            asyncio.get_running_loop().call_later(3600, print)
    return 1.0


def misbehave_in_a_thread(task: int) -> float | None:
    match task % 5:
        case 0:
            threading.Thread(target=time.sleep, args=(0.01,)).start()
        case 1:
            raise LookupError("no")
        case 2:
            sys.exit(1)
        case 3:
            return asyncio.run(asyncio.sleep(0, 0.5))
        case _:
            return None
    return 1.0


@pytest.mark.slow
@pytest.mark.parametrize("agent", [misbehave, misbehave_in_a_thread])
async def test_nothing_leaks_in_a_thousand_rollouts(store: SQLiteStore, agent: Agent) -> None:
    runner = Runner(
        agent, RunnerConfig(concurrency=100), store=store, endpoints=FixedEndpoint(endpoint)
    )

    async def work(prefix: str, count: int) -> None:
        ids = [f"{prefix}{n}" for n in range(count)]
        await store.enqueue(
            [Rollout(id=id, group=id, task=n, max_attempts=1) for n, id in enumerate(ids)]
        )
        await store.wait(ids)

    files = 0
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tg:
            tg.start_soon(runner.run)
            await work("warm", 100)
            gc.collect()
            await anyio.sleep(0.2)
            files, threads = open_files(), threading.active_count()
            await work("r", 1000)
            await anyio.sleep(0.2)
            gc.collect()
            assert open_files() <= files
            assert threading.active_count() <= max(threads, 100 + 20)
            tg.cancel_scope.cancel()
    left = [t for t in threading.enumerate() if t.name.startswith("whet-agent")]
    for thread in left:
        await anyio.to_thread.run_sync(thread.join, 5)
    assert not [t for t in left if t.is_alive()]
    assert open_files() < files


class Finalized:
    """Garbage that only a collection finds; remembers the threads in which that was."""

    threads: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        self.threads.add(threading.current_thread().name)


async def test_what_agents_leave_is_finalized_in_their_own_thread(store: SQLiteStore) -> None:
    async def agent(task: str) -> float:
        Finalized()
        await asyncio.sleep(0.01)
        return 1.0

    Finalized.threads.clear()
    await run(agent, ["a"] * 40, store)
    for thread in threading.enumerate():  # on a busy machine it ends after its runner
        if thread.name == "whet-agents":
            thread.join(60)
    assert Finalized.threads == {"whet-agents"}
    assert gc.isenabled()
