"""Agents that are commands: their environment, their output, and that no process is left."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import pytest
from anyio import to_thread
from pydantic import JsonValue

from whet.errors import AgentFailed, BadReward, ConfigError
from whet.runners.executors.command import RewardBy, command
from whet.types import Endpoint

pytestmark = pytest.mark.anyio

POSTED: dict[str, list[JsonValue]] = {}
BROKEN = set[str]()
"""Paths whose rewards cannot be listed, as by a gateway without its store."""


class Gateway(BaseHTTPRequestHandler):
    """Stores and lists posted rewards, as a gateway does."""

    def do_GET(self) -> None:
        body = json.dumps({"rewards": POSTED.get(self.path, [])}).encode()
        self.send_response(503 if self.path in BROKEN else 200)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        assert self.headers["authorization"] == "Bearer reward key"
        body = self.rfile.read(int(self.headers["content-length"]))
        POSTED.setdefault(self.path, []).append(json.loads(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def llm() -> Generator[Endpoint]:
    POSTED.clear()
    BROKEN.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/rollout/r/attempt/r.1/v1"
    yield Endpoint(base_url=url, api_key="key", model="policy", reward_key="reward key")
    server.shutdown()
    thread.join()
    server.server_close()


async def run(code: str, llm: Endpoint, task: JsonValue = None, by: RewardBy = "output") -> float:
    with anyio.fail_after(30):
        return await command([sys.executable, "-c", code], reward=by)(task, llm)


async def why(code: str, llm: Endpoint, task: JsonValue = None) -> str:
    with pytest.raises((AgentFailed, BadReward)) as error:
        await run(code, llm, task)
    return str(error.value)


async def test_it_finds_its_task_its_model_and_its_attempt(
    llm: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (secrets := ("WHET_STORE", "WHET_STORE_TOKEN", "WHET_JUDGE_KEY")):
        monkeypatch.setenv(name, "secret")
    seen = tmp_path / "seen.json"
    code = (
        "import json, os, sys\n"
        "file = os.environ['WHET_TASK_FILE']\n"
        "seen = dict(os.environ, stdin=sys.stdin.read(), file=json.load(open(file)))\n"
        f"json.dump(seen, open({str(seen)!r}, 'w'))\n"
        "print(1)"
    )
    task: JsonValue = {"question": "größe \ud83d"}
    assert await command([sys.executable, "-c", code], stdin=True)(task, llm) == 1.0
    assert json.loads(json.loads(seen.read_text())["stdin"]) == task
    assert await run(code, llm, task) == 1.0
    found = json.loads(seen.read_text())
    assert found["stdin"] == "", "coding agents append it to the prompt, with the answer"
    assert found["file"] == task
    assert not [name for name in found if name.startswith("WHET_REWARD")]
    assert "reward key" not in found.values()
    assert found["OPENAI_BASE_URL"] == llm.base_url
    assert found["OPENAI_API_KEY"] == found["ANTHROPIC_API_KEY"] == "key"
    assert found["ANTHROPIC_BASE_URL"] == llm.base_url.removesuffix("/v1")
    assert found["OPENAI_MODEL"] == found["WHET_MODEL"] == "policy"
    assert (found["WHET_ROLLOUT_ID"], found["WHET_ATTEMPT_ID"]) == ("r", "r.1")
    assert not found.keys() & set(secrets)
    assert is_gone(found["WHET_TASK_FILE"])


async def test_posted_rewards_that_cannot_be_listed_are_no_bad_reward(llm: Endpoint) -> None:
    BROKEN.add(f"{urlsplit(llm.base_url).path}/rewards")
    with pytest.raises(AgentFailed, match=r"cannot get the posted rewards .*: status 503"):
        await run("pass", llm, by="post")


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        ("print('thinking'); print(0.5)", 0.5),
        ('print(\'{"reward": 2, "why": "x"}\')', 2.0),
        ("print(-1, end='')", -1.0),
        ("print(1); print(); print('  ')", 1.0),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\xfe\\n0.25')", 0.25),
        ("import sys; sys.stdin.close(); print(1)", 1.0),
        ("for _ in range(300): print('x' * 10_000)\nprint(3)", 3.0),
    ],
)
async def test_the_last_line_it_prints_is_its_reward(
    llm: Endpoint, code: str, reward: float
) -> None:
    assert await run(code, llm, task={"long": "x" * 500_000}) == reward


async def test_a_reward_may_be_posted(llm: Endpoint) -> None:
    code = (
        "import json, os, urllib.request as r\n"
        "for value in (0.1, 0.75):\n"
        "    body = json.dumps({'value': value}).encode()\n"
        "    ask = r.Request(os.environ['WHET_REWARD_URL'], body,\n"
        "        {'authorization': 'Bearer ' + os.environ['WHET_REWARD_KEY']})\n"
        "    r.urlopen(ask)\n"
        "print(99)"
    )
    assert await run(code, llm, by="post") == 0.75
    POSTED.clear()
    BROKEN.clear()
    with pytest.raises(BadReward, match="post it to WHET_REWARD_URL with WHET_REWARD_KEY"):
        await run("print(99)", llm, by="post")


async def test_the_exit_code_may_be_the_reward(llm: Endpoint) -> None:
    assert await run("print('ok')", llm, by="exit") == 1.0
    assert await run("raise SystemExit(1)", llm, by="exit") == 0.0
    with pytest.raises(AgentFailed, match="exited with code 2"):
        await run("raise SystemExit(2)", llm, by="exit")


async def test_an_error_is_reported_in_one_line(llm: Endpoint) -> None:
    assert "exited with code 3; last output: a b" in await why(
        "import sys; print('a\\nb', file=sys.stderr); sys.exit(3)", llm
    )
    assert "was killed by SIGKILL" in await why("import os; os.kill(os.getpid(), 9)", llm)
    assert "no reward: end stdout" in await why("print('done')", llm)
    assert "it printed nothing" in await why("raise SystemExit(4)", llm)
    assert "finite" in await why("print('NaN')", llm)
    assert "finite number; found inf" in await why("print(10**400)", llm)
    assert "a reward is a number" in await why('print(\'{"reward": "much"}\')', llm)
    long = await why("import sys; print('x' * 10**6, file=sys.stderr); sys.exit(1)", llm)
    assert len(long) < 1000


def is_gone(file: str) -> bool:
    return not Path(file).exists()


def has_ended(pid: int) -> bool:
    """Soon: the dead are gone when the system has noticed."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 20
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


CHILD = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "open({file!r}, 'w').write(str(child.pid))\n"
)


KILLED = """
import subprocess
import sys
from functools import partial

import anyio

from whet.runners.executors.command import command
from whet.types import Endpoint

llm = Endpoint(base_url="http://127.0.0.1:9/rollout/r/attempt/r.1/v1", api_key="k", model="m")
anyio.run(partial(command([sys.executable, "-c", sys.argv[1]]), None, llm))
"""


def test_it_ends_with_its_children_when_its_runner_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = CHILD.format(file=str(file)) + "child.wait()"
    runner = subprocess.Popen([sys.executable, "-c", KILLED, code])
    wait_for(file)
    runner.kill()
    runner.wait()
    assert has_ended(int(file.read_text()))


async def test_a_child_that_outlives_it_is_ended_with_it(llm: Endpoint, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    assert await run(CHILD.format(file=str(file)) + "print(1)", llm) == 1.0
    assert has_ended(int(file.read_text()))


async def test_a_canceled_command_leaves_no_process(llm: Endpoint, tmp_path: Path) -> None:
    file, own = tmp_path / "pid", tmp_path / "own"
    code = f"import os; open({str(own)!r}, 'w').write(str(os.getpid()))\n"
    code += CHILD.format(file=str(file)) + "import time; time.sleep(60)"
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, code, llm)
            await to_thread.run_sync(wait_for, file)
            tasks.cancel_scope.cancel()
    assert has_ended(int(own.read_text()))
    assert has_ended(int(file.read_text()))


async def test_no_file_handles_or_processes_are_left(llm: Endpoint) -> None:
    await run("print(1)", llm)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await run("print(1)", llm)
        await why("raise SystemExit(1)", llm)
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_a_command_that_does_not_start_leaves_no_file_handles(
    llm: Endpoint, tmp_path: Path
) -> None:
    program = tmp_path / "agent"
    program.touch(mode=0o755)
    agent = command([str(program)])
    program.unlink()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(AgentFailed, match="cannot start the command"):
            await agent(None, llm)
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("arguments", [[], "node agent.js", ["no-such-command-here"]])
def test_an_invalid_command_is_refused_at_once(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"command"):
        command(arguments)
