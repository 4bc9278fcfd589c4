"""The coding agent in its sandboxes: the reward is the share of tests that the code passes."""

import json
import re
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import anyio
import pytest

import whet
from support.runs.commands import EXAMPLES, environment
from support.servers.prepared_model import PreparedModel
from whet.errors import ConfigError
from whet.runners.sandboxes import choose_sandbox

FOLDER = EXAMPLES / "coding_agent"
TASK: Any = {
    "question": "Write `double(n)`.",
    "tests": ["assert double(4) == 8", "assert double(0) == 0"],
}
RIGHT = "Here it is:\n```python\ndef double(n):\n    return 2 * n\n```\n"
HALF = "```\ndef double(n):\n    return n\n```"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[PreparedModel]:
    monkeypatch.chdir(tmp_path)  # where an agent without a sandbox writes
    model = PreparedModel()
    yield model
    model.close()


def attempt(
    model: PreparedModel, *replies: str, sandbox: str | None = None, task: Any = TASK
) -> float:
    model.replies = list(replies)
    agent = whet.command([sys.executable, str(FOLDER / "agent.py")], sandbox=sandbox)
    return anyio.run(agent, task, model.llm)


def works(name: str) -> bool:
    try:
        choose_sandbox(name)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("sandbox", [s for s in ("subprocess", "bubblewrap") if works(s)])
def test_code_that_passes_its_tests_is_rewarded_in_a_sandbox(
    model: PreparedModel, sandbox: str
) -> None:
    assert attempt(model, RIGHT, sandbox=sandbox) == 1.0
    assert len(model.requests) == 1


def test_the_first_failure_is_shown_and_the_second_answer_counts(model: PreparedModel) -> None:
    assert attempt(model, HALF, RIGHT) == 1.0
    assert (
        "This test fails:\nassert double(4) == 8\nAssertionError"
        in (model.requests[1]["messages"][-1]["content"])
    )


def test_the_reward_is_the_share_of_tests_that_pass(model: PreparedModel) -> None:
    assert attempt(model, "no code", HALF) == 0.5


@pytest.mark.parametrize("code", ["import sys\nsys.exit(0)", "raise SystemExit", "double = 1 / 0"])
def test_code_that_ends_early_passes_nothing(model: PreparedModel, code: str) -> None:
    block = f"```python\n{code}\n```"
    assert attempt(model, block, block) == 0.0


def test_made_tasks_differ_by_split_and_a_right_answer_passes(
    model: PreparedModel, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, str(FOLDER / "make_tasks.py"), str(tmp_path)], check=True)
    train, held_out = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("train.jsonl", "held_out.jsonl")
    )
    assert len(train) == len(held_out) == 60
    assert not {task["question"] for task in train} & {task["question"] for task in held_out}
    assert "times 3" in train[2]["question"]
    answer = "```python\ndef f(x):\n    return 3 * x\n```"
    assert attempt(model, answer, task=train[2]) == 1.0


def test_the_warm_up_has_right_and_wrong_answers_and_no_number_of_a_task(tmp_path: Path) -> None:
    file = tmp_path / "dialogues.jsonl"
    subprocess.run([sys.executable, str(FOLDER / "warmup.py"), str(file), "200"], check=True)
    dialogues = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    assert len(dialogues) == 200
    replies = [[m["content"] for m in each if m["role"] == "assistant"] for each in dialogues]
    wrong_first = [each for each in replies if len(each) == 2]
    assert 0.6 < len(wrong_first) / 200 < 0.95
    assert any(first != second for first, second in wrong_first)
    numbers = {
        int(number) for each in dialogues for number in re.findall(r"\d+", each[1]["content"])
    }
    assert not numbers & set(range(15))


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
