"""Agents in processes of their own."""

import os
from pathlib import Path

import anyio
import pool_agents
import pytest
from at_work import endpoint, run
from crossing import until

from whet.config import RunnerConfig
from whet.errors import ConfigError
from whet.runners.gateways import OwnGateway
from whet.runners.loading import load_function, spec_of
from whet.runners.local import LocalRunner
from whet.store.sqlite import SQLiteStore
from whet.types import AttemptId, Mode, Rollout

pytestmark = pytest.mark.anyio


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def test_attempts_run_in_as_many_processes_as_asked_and_these_are_used_again(
    store: SQLiteStore,
) -> None:
    groups = await run(pool_agents.work, [{"do": "pid"}] * 12, store, processes=2)
    pids = {group[0].reward for group in groups}
    assert 1 <= len(pids) <= 2
    assert os.getpid() not in pids
    assert not any(is_alive(int(pid)) for pid in pids)


@pytest.mark.parametrize("agent", [pool_agents.Solver, pool_agents.solver], ids=["class", "object"])
async def test_a_process_is_given_what_the_agent_names_and_tells_what_it_emits(
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


async def test_whatever_befalls_a_process_fails_its_attempt_only(store: SQLiteStore) -> None:
    deeds = ["pid", "raise", "exit", "interrupt", "die", "kill", "nan", "nothing", "print", "pid"]
    await run(pool_agents.work, [{"do": deed} for deed in deeds], store, processes=2)
    failures = await store.failures([f"r{n}" for n in range(len(deeds))])
    assert {deeds[int(id[1:])]: why for id, why in failures.items()} == {
        "raise": "agent: the agent raised: LookupError: gone",
        "exit": "agent: the agent raised: SystemExit: 3",
        "interrupt": "agent: the agent raised: KeyboardInterrupt: ",
        "die": "agent: its process ended by itself, with exit code 7",
        "kill": "agent: its process was killed by SIGKILL",
        "nan": "reward: a reward is a finite number; found nan",
        "nothing": "reward: no reward: return a number, or call whet.emit_reward(...)",
    }


async def test_a_limit_kills_the_process_and_all_it_started(
    store: SQLiteStore, tmp_path: Path
) -> None:
    tasks = [{"do": "hang", "note": str(tmp_path / "pids")}, {"do": "pid"}]
    groups = await run(pool_agents.work, tasks, store, processes=1, timeout_s=3)
    assert [len(group) for group in groups] == [0, 1]
    reason = (await store.failures(["r0"]))["r0"]
    assert reason == "timeout: the attempt ran longer than 3 s; its process was killed"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    with anyio.fail_after(5):
        await until(lambda: not any(map(is_alive, pids)))


async def test_a_cancel_kills_the_process(store: SQLiteStore, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    runner = LocalRunner(
        pool_agents.work, RunnerConfig(processes=1), store=store, gateways=OwnGateway(endpoint)
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


async def test_an_attempt_has_the_environment_of_its_process_to_itself(store: SQLiteStore) -> None:
    groups = await run(pool_agents.work, [{"do": "environment"}] * 4, store, processes=1)
    assert [group[0].reward for group in groups] == [1.0] * 4


async def test_an_agent_without_a_name_cannot_be_run_in_processes(store: SQLiteStore) -> None:
    with pytest.raises(ConfigError, match="find an agent by its name in a module: '<lambda>'"):
        LocalRunner(
            lambda task: 1.0,
            RunnerConfig(processes=1),
            store=store,
            gateways=OwnGateway(endpoint),
        )


def test_an_agent_of_a_file_is_found_by_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def solve(task, llm):\n    return 1.0\n")
    agent = load_function(f"{file}:solve")
    assert spec_of(agent) == f"{file}:solve"
    assert spec_of(pool_agents.solver) == "pool_agents:solver"
