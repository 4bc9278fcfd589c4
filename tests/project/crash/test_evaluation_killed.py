"""`whet eval` killed at any moment resumes: no task with a result runs again."""

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

AGENT = """
import time

def solve(task, llm):
    with open("ran.txt", "a") as file:
        file.write(f"{task}\\n")
    time.sleep(0.05)
    return float(task % 3 == 0)
"""
TASKS, SAMPLES, CONCURRENCY = 40, 3, 4
LINES = 2 * TASKS * (SAMPLES + 1)


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    line = ["eval", "agent.py:solve", "--tasks", "tasks.jsonl", "--json", *arguments]
    flags = [f"--runner.concurrency={CONCURRENCY}", f"--evaluation.samples={SAMPLES}"]
    return subprocess.Popen(
        [sys.executable, "-m", "whet", *line, *flags],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines(file: Path) -> list[dict[str, object]]:
    """Read the complete lines; the kill may have cut the last one."""
    if not file.exists():
        return []
    text = file.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def test_a_killed_evaluation_completes_without_repeating(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text("".join(f"{number}\n" for number in range(TASKS)))
    results = tmp_path / ".whet" / "runs" / "killed" / "results.jsonl"
    arguments = ["--name", "killed", "--model", "a=tiny", "--model", "b=tiny"]
    kills = 0
    for point in (25, TASKS * (SAMPLES + 1) + 25):
        with start(tmp_path, *arguments) as run:
            deadline = time.monotonic() + 300
            while len(lines(results)) < point:
                assert run.poll() is None, run.stderr and run.stderr.read()
                assert time.monotonic() < deadline, "the evaluation does not get on"
                time.sleep(0.02)
            run.kill()
        kills += 1
        assert len(lines(results)) < LINES
        arguments = ["--resume", "killed"]
    with results.open("a") as file:
        file.write('{"run": "killed", "mod')  # what a kill in mid-write leaves

    with start(tmp_path, *arguments) as run:
        out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    report = json.loads(out)
    written = lines(results)
    keys = {(line["model"], line["rollout"]) for line in written}
    assert len(written) == len(keys) == LINES
    assert {name: found["failed"] for name, found in report["models"].items()} == {"a": 0, "b": 0}
    gain = report["models"]["b"]["gain"]["sampled"]
    assert (gain["mean"], gain["tasks"]) == (0, TASKS)
    assert -0.05 < gain["ci95"][0] < 0 < gain["ci95"][1] < 0.05
    # Every rollout ran once; at most what was under way at a kill ran again.
    ran = Counter((tmp_path / "ran.txt").read_text().split())
    assert all(count >= 2 * (SAMPLES + 1) for count in ran.values())
    assert sum(ran.values()) - LINES <= kills * CONCURRENCY
