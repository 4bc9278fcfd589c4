"""The coding agent in its sandboxes: the reward is the share of tests that the code passes."""

import json
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import whet
from support.commands import EXAMPLES, environment
from whet.errors import ConfigError
from whet.io.server import AppServer
from whet.runners.sandboxes.choice import choose_sandbox
from whet.types import Endpoint

FOLDER = EXAMPLES / "coding_agent"
PATH = "/rollouts/r/attempts/a/v1"
"""Of an attempt, which is all that a sandbox may reach."""
TASK: Any = {
    "question": "Write `double(n)`.",
    "tests": ["assert double(4) == 8", "assert double(0) == 0"],
}
RIGHT = "Here it is:\n```python\ndef double(n):\n    return 2 * n\n```\n"
HALF = "```\ndef double(n):\n    return n\n```"


class Model:
    """An endpoint that answers with prepared texts, and keeps what it was asked."""

    def __init__(self) -> None:
        self.replies: list[str] = []
        self.asked: list[Any] = []
        self._server = AppServer(
            Starlette(routes=[Route(f"{PATH}/chat/completions", self._answer, methods=["POST"])]),
            name="model",
        )
        self.llm = Endpoint(base_url=f"{self._server.url}{PATH}", api_key="k", model="m")

    async def _answer(self, request: Request) -> JSONResponse:
        self.asked.append(await request.json())
        message = {"role": "assistant", "content": self.replies.pop(0)}
        return JSONResponse({"choices": [{"message": message}]})

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Model]:
    monkeypatch.chdir(tmp_path)  # where an agent without a sandbox writes
    model = Model()
    yield model
    model.close()


def attempt(model: Model, *replies: str, sandbox: str | None = None) -> float:
    model.replies = list(replies)
    agent = whet.command([sys.executable, str(FOLDER / "agent.py")], sandbox=sandbox)
    return anyio.run(agent, TASK, model.llm)


def works(name: str) -> bool:
    try:
        choose_sandbox(name)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("sandbox", [s for s in ("subprocess", "bubblewrap") if works(s)])
def test_code_that_passes_its_tests_is_rewarded_in_a_sandbox(model: Model, sandbox: str) -> None:
    assert attempt(model, RIGHT, sandbox=sandbox) == 1.0
    assert len(model.asked) == 1


def test_the_first_failure_is_shown_and_the_second_answer_counts(model: Model) -> None:
    assert attempt(model, HALF, RIGHT) == 1.0
    assert (
        "This test fails:\nassert double(4) == 8\nAssertionError"
        in (model.asked[1]["messages"][-1]["content"])
    )


def test_the_reward_is_the_share_of_tests_that_pass(model: Model) -> None:
    assert attempt(model, "no code", HALF) == 0.5


@pytest.mark.parametrize("code", ["import sys\nsys.exit(0)", "raise SystemExit", "double = 1 / 0"])
def test_code_that_ends_early_passes_nothing(model: Model, code: str) -> None:
    block = f"```python\n{code}\n```"
    assert attempt(model, block, block) == 0.0


@pytest.mark.slow
def test_the_small_form_of_the_readme_runs(tmp_path: Path) -> None:
    sandbox = ["--sandbox", "subprocess"] if works("subprocess") else []
    tasks = ["--tasks", str(FOLDER / "tasks.jsonl"), "--model", "tiny", "--json"]
    command = [sys.executable, str(FOLDER / "agent.py")]
    done = subprocess.run(
        [sys.executable, "-m", "whet", "dev", *tasks, *sandbox, "--", *command],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    attempts = json.loads(done.stdout)["attempts"]
    assert len(attempts) == 3
    assert all(0 <= one["reward"] <= 1 for one in attempts)
