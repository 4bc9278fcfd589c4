"""A run in several processes, with a real model."""

import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio
import httpx
import pytest

from support.runs.processes import Command, start
from support.servers.tinker_serving import KEY, Server
from whet.store.sqlite import SQLiteStore
from whet.types import Status

pytestmark = pytest.mark.slow

STEPS, TASKS, GROUP = 4, 2, 4
AGENT = """
import asyncio, httpx

async def solve(task, llm):
    async with httpx.AsyncClient(base_url=llm.base_url + "/", verify=False, timeout=60) as client:
        reply = await client.post(
            "chat/completions",
            headers={"Authorization": f"Bearer {llm.api_key}"},
            json={
                "model": llm.model,
                "messages": [{"role": "user", "content": task}],
                "max_tokens": 8,
            },
        )
    reply.raise_for_status()
    await asyncio.sleep(0.2)
    return len(reply.json()["choices"][0]["message"]["content"] or "") / 40
"""
COMMAND_AGENT = """
import json, os, urllib.request

request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    headers={
        "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        "Content-Type": "application/json",
    },
    data=json.dumps({
        "model": os.environ["OPENAI_MODEL"],
        "messages": [{"role": "user", "content": json.load(open(os.environ["WHET_TASK_FILE"]))}],
        "max_tokens": 8,
    }).encode(),
)
reply = json.load(urllib.request.urlopen(request))
print(len(reply["choices"][0]["message"]["content"] or "") / 40)
"""
STEPS_AND_TASKS = (
    *("--tasks", "tasks.jsonl", "--held-out", "held_out.jsonl"),
    *(f"--steps={STEPS}", f"--tasks-per-step={TASKS}", f"--group-size={GROUP}", "--seed=3"),
)
TRAINING = (*STEPS_AND_TASKS, "--trainer.weights", "full")
FEW_AT_ONCE = ("--concurrency", "3")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    words = ["one", "two", "three", "four", "five", "six"]
    for name, some in {"tasks.jsonl": words[:4], "held_out.jsonl": words[4:]}.items():
        (tmp_path / name).write_text("".join(json.dumps(f"say {word}") + "\n" for word in some))
    return tmp_path


@contextmanager
def served(folder: Path) -> Generator[tuple[ExitStack, dict[str, str]]]:
    """A store and a gateway; commands entered into the stack end with them."""
    with ExitStack() as stack:
        store = stack.enter_context(start(folder, "store", "--port", "0"))
        url = store.hears("store listens at").split()[3].rstrip(",")
        where = {"WHET_STORE": url}
        stack.enter_context(start(folder, "serve", **where))
        yield stack, where


def gateways(folder: Path, where: dict[str, str]) -> list[dict[str, str]]:
    """Read from the store where the gateways serve the model."""
    token = (folder / ".whet" / "store.token").read_text().strip()
    found = httpx.get(
        f"{where['WHET_STORE']}/v1/runs/default/gateways",
        headers={"Authorization": f"Bearer {token}"},
    ).json()
    for each in found:
        assert httpx.get(f"{each['url']}/health").is_success
    return found


def check(folder: Path, report: dict[str, object]) -> None:
    """All that must hold of a run, whatever its processes went through."""
    assert report["steps"] == STEPS
    assert report["unproven_generations"] == 0
    assert report["failed_rollouts"] == 0

    async def read() -> None:
        async with SQLiteStore(folder / ".whet" / "store.db") as store:
            steps = await store.steps()
            consumed = [rollout for step in steps for rollout in step.consumed]
            assert len(consumed) == len(set(consumed)) == STEPS * TASKS * GROUP
            records = await store.rollouts(limit=1000)
            assert {record.status for record in records} == {Status.SUCCEEDED}
            trained = [step for step in steps if "logprob_gap" in step.metrics]
            assert trained
            # Sampled in another process, and on policy: the same numbers but for rounding.
            assert max(step.metrics["logprob_gap"] for step in trained) < 1e-4
            assert all(step.metrics["staleness"] == 0 for step in trained)
            for step in steps:
                (trajectory, *_) = await store.trajectories(step.consumed[:1])
                (generation,) = trajectory.calls[0].generations
                before = steps[step.step - 1].version if step.step else 0
                assert set(generation.versions) == {before}

    anyio.run(read)


def test_four_processes_train_while_runners_join_and_leave(folder: Path) -> None:
    with served(folder) as (stack, where):

        def runner() -> Command:
            return stack.enter_context(
                start(folder, "runner", "agent.py:solve", *FEW_AT_ONCE, **where)
            )

        train = stack.enter_context(start(folder, "train", *TRAINING, "--json", **where))
        first = runner()
        train.hears("1/4")
        second = runner()
        second.hears("joined run default")
        assert [each["model"] for each in gateways(folder, where)] == ["policy"]
        assert first.stop() == 0
        assert train.ends() == 0, train.output
        assert second.stop() == 0
        assert "left: 0 " not in second.output
    check(folder, json.loads(train.lines[-1]))


def test_a_trainer_that_was_suspended_replaces_no_weights_of_its_successor(folder: Path) -> None:
    training = [flag for flag in TRAINING if "held" not in flag]
    with served(folder) as (stack, where):
        where["WHET_STORE_TOKEN"] = (folder / ".whet" / "store.token").read_text().strip()
        old = stack.enter_context(start(folder, "train", *training, "--dir", "a", **where))
        old.hears("no runner is connected")
        os.kill(old.process.pid, signal.SIGSTOP)
        new = stack.enter_context(
            start(folder, "train", *training, "--dir", "b", "--json", **where)
        )
        stack.enter_context(start(folder, "runner", "agent.py:solve", *FEW_AT_ONCE, **where))
        new.hears("note: took over the run 'default' from")
        new.hears("2/4")
        os.kill(old.process.pid, signal.SIGCONT)
        assert old.ends() == 2
        assert f":{folder}/b/runs/default" in old.hears("another trainer has taken over the run")
        assert new.ends() == 0, new.output
        third = stack.enter_context(start(folder, "train", *training, "--dir", "c", **where))
        assert third.ends() == 2
        third.hears("does not have its checkpoint 'step-000003': continue with the dir")
    check(folder, json.loads(new.lines[-1]))


def test_what_is_killed_is_started_again_and_nothing_is_lost(folder: Path) -> None:
    with start(folder, "up", "agent.py:solve", *TRAINING, "--runner.concurrency=3") as up:
        for number, name in enumerate(["runner-1", "serve", "train", "store"], start=1):
            up.hears(f" {number}/4 " if number < 4 else "train    | runner", timeout=300)
            os.kill(pid_of(folder, name), signal.SIGKILL)
            up.hears(f"{name:<9}| died (SIGKILL)")
        assert up.ends() == 0, up.output
        assert not processes_in(folder)
    check(folder, json.loads((folder / ".whet/runs/default/report.json").read_text()))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_supervisor_that_ends_leaves_no_orphans(folder: Path, how: signal.Signals) -> None:
    with start(folder, "up", "agent.py:solve", *TRAINING) as up:
        up.hears("store listens")
        up.hears("joined run default")
        os.kill(up.process.pid, how)
        assert up.ends() in (130, -signal.SIGKILL)
        deadline = time.monotonic() + 60
        while processes_in(folder):
            assert time.monotonic() < deadline, processes_in(folder)
            time.sleep(0.1)
    assert how == signal.SIGKILL or "the same command resumes" in up.output


def test_all_of_them_train_the_model_behind_a_command(folder: Path) -> None:
    (folder / "agent_command.py").write_text(COMMAND_AGENT)
    command = (sys.executable, "agent_command.py")
    with start(folder, "up", *TRAINING, "--runners=2", "--", *command) as up:
        assert up.ends() == 0, up.output
        assert "runner-2 |" in up.output
    check(folder, json.loads((folder / ".whet/runs/default/report.json").read_text()))


def test_an_error_that_the_user_has_to_fix_ends_all_processes(folder: Path) -> None:
    with start(folder, "up", "agent.py:slove", *TRAINING) as up:
        assert up.ends() == 2
        assert "runner-1 | whet: 'agent.py' has no 'slove', did you mean 'solve'?" in up.lines
        assert not processes_in(folder)


def test_a_step_in_which_all_fails_ends_all_processes_and_the_run_takes_more_steps(
    folder: Path,
) -> None:
    agent = folder / "agent.py"
    agent.write_text(AGENT.replace("await asyncio.sleep(0.2)", "raise LookupError('no luck')"))
    flags = ("--tasks=tasks.jsonl", "--tasks-per-step=2", "--group-size=4", "--seed=3")
    training = (*flags, "--trainer.weights=full")
    with start(folder, "up", "agent.py:solve", *training, "--steps=2") as up:
        assert up.ends() == 2, up.output
        problem = up.hears(
            "every rollout of step 1 failed, 8 of 8, such as: agent: the agent raised"
        )
        assert problem.startswith("train    | whet: ")
        assert "LookupError: no luck (agent.py:" in problem
        up.hears(" left: 16 failed (agent)")
        assert not processes_in(folder)
    agent.write_text(AGENT)
    with served(folder) as (stack, where):
        stack.enter_context(start(folder, "runner", "agent.py:solve", **where))
        for steps in ("2", "3"):  # after the failed step, and more than the run had
            command = ("train", *training, "--steps", steps, "--json")
            with start(folder, *command, **where) as train:
                assert train.ends() == 0, train.output
                assert json.loads(train.lines[-1])["steps"] == int(steps)


@pytest.fixture
def service(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    server = Server(tmp_path_factory.mktemp("tinker") / "dir")
    yield server
    server.stop()


def test_all_of_it_at_a_tinker_service(folder: Path, service: Server) -> None:
    place = ("--trainer=tinker", f"--trainer.base-url={service.url}")
    command = ("up", "agent.py:solve", *STEPS_AND_TASKS, "--runner.concurrency=3", *place)
    with start(folder, *command, TINKER_API_KEY="tml-another") as up:
        assert up.ends() == 2
        assert "invalid API key: set TINKER_API_KEY" in up.hears("train    | whet: ")
    with start(folder, *command, TINKER_API_KEY=KEY) as up:
        for number, name in enumerate(["serve", "train"], start=1):
            up.hears(f" {number}/4 ")
            os.kill(pid_of(folder, name), signal.SIGKILL)
            up.hears(f"{name:<9}| died (SIGKILL)")
        assert up.ends() == 0, up.output
        assert not processes_in(folder)
    check(folder, json.loads((folder / ".whet/runs/default/report.json").read_text()))


def processes_in(folder: Path) -> dict[str, int]:
    """The whet processes that work in a folder: pids by command."""
    found: dict[str, int] = {}
    for proc in Path("/proc").iterdir():
        try:
            if proc.name.isdecimal() and (proc / "cwd").readlink() == folder:
                _, _, _, command, *_ = (proc / "cmdline").read_bytes().decode().split("\0")
                found[command] = int(proc.name)
        except (OSError, ValueError):
            continue
    return found


def pid_of(folder: Path, name: str) -> int:
    return processes_in(folder)[name.removesuffix("-1")]


def test_an_algorithm_runs_alone_and_beside_the_others(folder: Path) -> None:
    example = Path(__file__).parents[3] / "examples" / "custom_driver" / "collect.py"
    arguments = ("train", "--algorithm", f"{example}:collect", "--tasks", "problems.jsonl")
    from whet.demos.problems import problems

    lines = [json.dumps(problem) + "\n" for problem in problems("test", 4, 1)]
    (folder / "problems.jsonl").write_text("".join(lines))
    with start(folder, *arguments, f"{example}:solve", "--json") as alone:
        assert alone.ends() == 0, alone.output
        assert alone.lines[-2].endswith("of 4")
        assert 0 <= float(alone.lines[-1]) <= 1
    with served(folder) as (stack, where):
        stack.enter_context(start(folder, "runner", f"{example}:solve", **where))
        with start(folder, *arguments, **where) as joint:
            assert joint.ends() == 0, joint.output
            assert "token ids: [" in joint.output
    with sqlite3.connect(folder / ".whet" / "store.db") as db:
        assert db.execute("SELECT count(*) FROM rollout").fetchone() == (4,)
