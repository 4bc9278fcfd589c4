"""Agents in processes of their own."""

import asyncio
import os
import re
import threading
from pathlib import Path

import anyio
import pytest

from support.agents import pool_agents
from support.agents.cross_thread import until
from support.agents.run_agents import FixedEndpoint, endpoint, run
from whet.config import RunnerConfig
from whet.errors import ConfigError
from whet.runners.attempt import count_processes
from whet.runners.loading import get_spec, load_function
from whet.runners.runner import Runner
from whet.store.sqlite import SQLiteStore
from whet.types import AttemptId, Mode, Rollout

pytestmark = pytest.mark.anyio


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def test_attempts_run_in_the_configured_number_of_processes_which_are_reused(
    store: SQLiteStore,
) -> None:
    groups = await run(pool_agents.work, [{"do": "pid"}] * 12, store, processes=2)
    pids = {group[0].reward for group in groups}
    assert 1 <= len(pids) <= 2
    assert os.getpid() not in pids
    assert not any(is_alive(int(pid)) for pid in pids)


async def test_agents_in_other_processes_need_no_thread_in_this_one(store: SQLiteStore) -> None:
    threads = set[str]()
    runner = Runner(
        pool_agents.work,
        RunnerConfig(processes=1),
        store=store,
        endpoints=FixedEndpoint(endpoint),
        on_outcome=lambda *_: threads.update(thread.name for thread in threading.enumerate()),
    )
    await store.enqueue([Rollout(id="a", group="a", task={"do": "pid"})])
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tg:
            tg.start_soon(runner.run)
            await until(lambda: bool(threads))
            tg.cancel_scope.cancel()
    assert "whet-agents" not in threads


@pytest.mark.parametrize("agent", [pool_agents.Solver, pool_agents.solver], ids=["class", "object"])
async def test_a_process_gets_the_parameters_and_returns_rewards_and_spans(
    store: SQLiteStore, agent: object
) -> None:
    prompt = {"template": "Solve {question}!"}
    groups = await run(
        agent, ["it"], store, processes=1, mode=Mode.VAL, resources={"prompt": prompt}
    )
    (trajectory,) = groups[0]
    assert trajectory.reward == 1.0
    assert [(r.key, r.value) for r in trajectory.rewards] == [("steps", 0.5), ("reward", 1.0)]
    spans = {span.name: span for span in await store.spans(AttemptId("r0.1"))}
    assert spans["message"].attributes["whet.message"] == "Solve it!"
    assert spans["message"].parent_id == spans["think"].span_id


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [2, 10])
async def test_a_process_that_fails_or_dies_fails_its_attempt_only(
    store: SQLiteStore, concurrency: int
) -> None:
    deeds = ["pid", "raise", "exit", "interrupt", "die", "kill", "nan", "nothing", "print", "pid"]
    tasks = [{"do": deed} for deed in deeds]
    await run(pool_agents.work, tasks, store, processes=2, concurrency=concurrency)
    failures = await store.failures([f"r{n}" for n in range(len(deeds))])
    line = re.compile(r" \(.*pool_agents.py:\d+\)$")
    assert len([why for why in failures.values() if line.search(why)]) == 3
    assert {deeds[int(id[1:])]: line.sub("", why) for id, why in failures.items()} == {
        "raise": "agent: the agent raised: LookupError: gone",
        "exit": "agent: the agent raised: SystemExit: 3",
        "interrupt": "agent: the agent raised: KeyboardInterrupt: ",
        "die": "agent: the agent process exited with code 7",
        "kill": "agent: the agent process was killed by SIGKILL",
        "nan": "bad_reward: a reward is a finite number; found nan",
        "nothing": "bad_reward: no reward: return a number, or call whet.emit_reward(...)",
    }
    failure = (await store.attempts("r1"))[-1].failure
    assert failure
    assert "in work" in failure.traceback


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 2])
async def test_a_limit_kills_the_process_and_all_it_started(
    store: SQLiteStore, tmp_path: Path, concurrency: int
) -> None:
    tasks = [{"do": "hang", "note": str(tmp_path / "pids")}, {"do": "pid"}]
    groups = await run(
        pool_agents.work, tasks, store, processes=1, concurrency=concurrency, timeout_s=3
    )
    assert [len(group) for group in groups] == [0, 1]
    reason = (await store.failures(["r0"]))["r0"]
    assert reason == "timeout: the attempt ran longer than 3 s"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    with anyio.fail_after(5):
        await until(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize("concurrency", [1, 2])
async def test_a_cancel_kills_the_process(
    store: SQLiteStore, tmp_path: Path, concurrency: int
) -> None:
    note = tmp_path / "pids"
    runner = Runner(
        pool_agents.work,
        RunnerConfig(processes=1, concurrency=concurrency),
        store=store,
        endpoints=FixedEndpoint(endpoint),
    )
    await store.enqueue([Rollout(id="a", group="a", task={"do": "hang", "note": str(note)})])
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tg:
            tg.start_soon(runner.run)
            await until(lambda: note.exists() and len(note.read_text().split()) == 2)
            pid = int(note.read_text().split()[0])
            await store.cancel(["a"])
            await until(lambda: not is_alive(pid))
            tg.cancel_scope.cancel()


async def test_a_canceled_runner_lets_an_attempt_that_cleans_up_in_its_process_end(
    store: SQLiteStore, tmp_path: Path
) -> None:
    runner = Runner(
        pool_agents.clean_up,
        RunnerConfig(processes=1, concurrency=2),
        store=store,
        endpoints=FixedEndpoint(endpoint),
    )
    await store.enqueue([Rollout(id="a", group="a", task=str(tmp_path))])
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tg:
            tg.start_soon(runner.run)
            await until((tmp_path / "begun").exists)
            await store.cancel(["a"])
            await until((tmp_path / "canceled").exists)
            tg.cancel_scope.cancel()
            asyncio.get_running_loop().call_later(0.3, (tmp_path / "go").touch)
    assert (tmp_path / "clean").exists()


async def test_an_attempt_has_the_environment_of_its_process_to_itself(store: SQLiteStore) -> None:
    tasks = [{"do": "environment"}] * 4
    groups = await run(pool_agents.work, tasks, store, processes=1, concurrency=1)
    assert [group[0].reward for group in groups] == [1.0] * 4


async def test_many_attempts_share_a_process_its_event_loop_and_its_globals(
    store: SQLiteStore,
) -> None:
    groups = await run(pool_agents.meet, [6] * 6, store, processes=1, concurrency=6)
    assert [group[0].reward for group in groups] == [1.0] * 6


BARRIER = """
import os, pathlib, time
folder = pathlib.Path(__file__).parent
(folder / f"{os.getpid()}.loading").touch()
deadline = time.monotonic() + 20
# This process and the first of the pool load it by themselves, the two others together.
while len(list(folder.glob("*.loading"))) == 3:
    assert time.monotonic() < deadline, "alone"
    time.sleep(0.01)
def solve(task, llm):
    return 1.0
"""


async def test_processes_load_the_agent_at_the_same_time(
    store: SQLiteStore, tmp_path: Path
) -> None:
    file = tmp_path / "barrier.py"
    file.write_text(BARRIER)
    agent = load_function(f"{file}:solve")
    groups = await run(agent, ["a"] * 12, store, processes=3, concurrency=12)
    assert [group[0].reward for group in groups] == [1.0] * 12


@pytest.mark.parametrize(("cores", "processes"), [(2, 0), (4, 2), (6, 3), (12, 8), (64, 12)])
async def test_by_default_an_agent_with_a_name_gets_half_the_cores_or_all_but_four(
    monkeypatch: pytest.MonkeyPatch, cores: int, processes: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(cores))
    monkeypatch.setattr("whet.runners.attempt.FEW_CORES", 2)
    assert count_processes(pool_agents.work, RunnerConfig()) == processes


async def test_there_are_no_more_processes_than_attempts_and_none_where_they_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(12))
    monkeypatch.setattr("whet.runners.attempt.FEW_CORES", 2)
    assert count_processes(pool_agents.work, RunnerConfig(concurrency=4)) == 4
    assert count_processes(pool_agents.work, RunnerConfig(processes=0)) == 0
    assert count_processes(lambda task: 1.0, RunnerConfig()) == 0


async def test_an_agent_without_a_name_cannot_be_run_in_processes(store: SQLiteStore) -> None:
    with pytest.raises(ConfigError, match="import an agent by its name: '<lambda>'"):
        Runner(
            lambda task: 1.0,
            RunnerConfig(processes=1),
            store=store,
            endpoints=FixedEndpoint(endpoint),
        )


def test_an_agent_of_a_file_is_found_by_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def solve(task, llm):\n    return 1.0\n")
    agent = load_function(f"{file}:solve")
    assert get_spec(agent) == f"{file}:solve"
    assert get_spec(pool_agents.solver) == "support.agents.pool_agents:solver"
