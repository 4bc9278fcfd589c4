"""Agents that are commands and services, through a training step."""

import json
import shutil
import signal
import socket
import sqlite3
import subprocess
import time
from contextlib import closing, suppress
from pathlib import Path

import anyio
import pytest

from support.runs.processes import start
from whet.app.cli.main import main
from whet.store.sqlite import SQLiteStore

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
SMALL = ("--model=tiny", "--tasks-per-step=2", "--group-size=2", "--trainer.weights=full",
         "--algorithm.name=positive")  # fmt: skip
"""Two answers to a task are often equal: with another algorithm nothing would be trained."""


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("runner", "expected one: module:function"),
        ("runner a.py:f --service http://x", "expected one: module:function"),
        ("runner a.py:f -- node a.js", "expected one: module:function"),
        ("runner -- no-such-command x", "command not found: 'no-such-command'"),
        ("runner --service ftp://x", "a service has a URL"),
    ],
)
def test_a_command_line_names_one_agent(
    command: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    assert says in capsys.readouterr().err


def test_a_command_in_quotes_is_not_found_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runner", "--", "node agent.js"]) == 2
    assert "not found: 'node agent.js', did you mean it without" in capsys.readouterr().err


def rewards(folder: Path, rollouts: int) -> list[float]:
    """Of every rollout, each of which must have ended well and called its model."""
    (store_file,) = folder.glob(".whet/runs/*/store.db")

    async def read() -> list[float]:
        async with SQLiteStore(store_file) as store:
            (name,) = await store.size()
            run = store.for_run(name)
            ids = [record.rollout.id for record in await run.rollouts(limit=1000)]
            trajectories = await run.trajectories(ids)
            assert len(trajectories) == len(ids) >= rollouts
            assert all(trajectory.calls for trajectory in trajectories)
            return [trajectory.reward for trajectory in trajectories]

    return anyio.run(read)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["node agent.js", "sh agent.sh"])
def test_an_agent_in_another_language_is_trained(command: str, tmp_path: Path) -> None:
    program, file = command.split()
    for needed in {"node": ["node"], "sh": ["curl", "jq"]}[program]:
        if shutil.which(needed) is None:
            pytest.skip(f"needs {needed}")
    folder = EXAMPLES / "any_command"
    arguments = ("train", "--tasks", str(folder / "tasks.jsonl"), *SMALL, "--steps=1", "--json")
    with start(tmp_path, *arguments, "--", program, str(folder / file)) as train:
        assert train.ends() == 0, train.output
    result = json.loads(train.lines[-1])
    assert (result["steps"], result["failed_rollouts"]) == (1, 0)
    assert len(rewards(tmp_path, 4)) == 4


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.slow
def test_a_service_is_killed_and_restarted_in_the_middle_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "integrations" / "sdks"))
    from integrations.sdks.environments import python_of

    python = python_of("openai-agents")
    port = free_port()

    def serve() -> subprocess.Popen[bytes]:
        server = EXAMPLES / "agent_service" / "agent_server.py"
        return subprocess.Popen([str(python), str(server), str(port)], env={"PATH": "/usr/bin"})

    monkeypatch.setenv("AGENT_URL", f"http://127.0.0.1:{port}/chat")
    client = f"{EXAMPLES / 'agent_service' / 'agent_client.py'}:AgentClient"
    tasks = EXAMPLES / "agent_service" / "tasks.jsonl"
    arguments = ("train", "--tasks", str(tasks), *SMALL, "--steps=4", "--group-size=4", "--json")
    service = serve()
    try:
        with start(tmp_path, *arguments, "--service", client) as train:
            wait_for_calls(tmp_path, 6)
            service.send_signal(signal.SIGKILL)
            service.wait(30)
            time.sleep(1)
            assert train.process.poll() is None, train.output
            service = serve()
            assert train.ends() == 0, train.output
    finally:
        service.kill()
        service.wait(30)
    result = json.loads(train.lines[-1])
    assert (result["steps"], result["failed_rollouts"]) == (4, 0), train.output
    rewards(tmp_path, 32)


def wait_for_calls(folder: Path, calls: int) -> None:
    """Until so many calls are recorded: the run is in the middle of something."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for file in folder.glob(".whet/runs/*/store.db"):
            with suppress(sqlite3.Error), closing(sqlite3.connect(file)) as db:
                if db.execute("SELECT count(*) FROM call").fetchone()[0] >= calls:
                    return
        time.sleep(0.2)
    raise AssertionError("the agent calls nothing")
