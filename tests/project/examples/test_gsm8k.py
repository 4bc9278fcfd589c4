"""The agent on problems in the format of GSM8K: its calculator, its reward, a run that resumes."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.runs.commands import EXAMPLES, environment, report

FOLDER = EXAMPLES / "gsm8k"


@pytest.fixture(scope="module")
def agent() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gsm8k_agent", FOLDER / "agent.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("(12 + 8) * 7 / 2", "70"),
        ("1,200 - 45 * 20", "300"),
        ("$93 / 6", "15.5"),
        ("-3 ** 2 % 5", "1"),
        ("1 / 3", "0.333333333333"),
        ("1 / 0", "error: "),
        ("9 ** 9 ** 9 ** 9", "error: "),
        ("__import__('os')", "error: expected numbers"),
        ("2 +", "error: "),
        ("(" * 5000, "error: "),
    ],
)
def test_the_calculator_computes_numbers_and_nothing_else(
    agent: ModuleType, expression: str, result: str
) -> None:
    found = agent.use_calculator("calculator", json.dumps({"expression": expression}))
    assert found.startswith(result) if result.startswith("error: ") else found == result


@pytest.mark.parametrize("arguments", ["{}", "[]", "no JSON", '"text"', "null"])
def test_a_malformed_call_is_answered(agent: ModuleType, arguments: str) -> None:
    assert agent.use_calculator("calculator", arguments).startswith("error: ")
    assert agent.use_calculator("python", arguments) == "error: there is no tool 'python'"


def test_the_reward_is_an_exact_match_of_the_final_number(agent: ModuleType) -> None:
    gold = "12*100=<<12*100=1200>>1200.\n#### 1,200"
    assert agent.score(gold, "#### 1200") == 1.0
    assert agent.score(gold, "It is 1,200.00 dollars.") == 1.0
    assert agent.score(gold, "#### 1200\nThat is 12 times 100.") == 0.0
    assert agent.score(gold, "1200 or 12") == 0.0
    assert agent.score(gold, "I do not know.") == 0.0


def test_every_problem_has_its_gold_answer(agent: ModuleType) -> None:
    lines = (FOLDER / "problems.jsonl").read_text().splitlines()
    for problem in map(json.loads, lines):
        assert agent.score(problem["answer"], problem["answer"]) == 1.0
        last = problem["answer"].rpartition("<<")[2].partition(">>")[0].partition("=")[0]
        result = agent.use_calculator("calculator", json.dumps({"expression": last}))
        assert agent.score(problem["answer"], result) == 1.0


@pytest.mark.slow
def test_a_run_stops_at_its_budget_and_resumes(tmp_path: Path) -> None:
    problems = str(FOLDER / "problems.jsonl")
    flags = ["--tasks", problems, "--held-out", problems, "--model", "tiny", "--dir", str(tmp_path)]
    sizes = ["--tasks-per-step", "3", "--group-size", "4", "--steps", "2", "--name", "gsm8k"]
    limits = [
        "--runner.processes",
        "0",
        "--engine.kv-tokens",
        "16384",
        "--engine.max-context",
        "512",
    ]

    def train(*more: str) -> None:
        config = ["--config", str(FOLDER / "h200.toml")]
        command = ["-m", "whet", "train", f"{FOLDER / 'agent.py'}:solve", *config, *flags]
        done = subprocess.run(
            [sys.executable, *command, *sizes, *limits, *more],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        # It ends with 1 if no step had a signal, as when the tiny model answers nothing right.
        assert done.returncode == 0 or "nothing was trained" in done.stderr, done.stderr

    train("--budget.minutes", "0.0001")
    assert report(tmp_path, "gsm8k")["steps"] == 1
    train("--resume", "--budget.minutes", "10")
    learned = report(tmp_path, "gsm8k")
    assert learned["steps"] == 2
    assert learned["failed_rollouts"] == learned["unproven_generations"] == 0
