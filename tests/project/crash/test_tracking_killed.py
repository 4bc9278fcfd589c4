"""A run killed while it is tracked: after the resume every tracker has every step once."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.runs.readers import read_wandb

pytestmark = pytest.mark.slow

AGENT = """
import random
import httpx

async def solve(task, llm):
    async with httpx.AsyncClient(base_url=llm.base_url + "/", verify=False) as client:
        reply = await client.post(
            "chat/completions",
            headers={"Authorization": f"Bearer {llm.api_key}"},
            json={
                "model": llm.model,
                "messages": [{"role": "user", "content": task}],
                "max_tokens": 4,
            },
        )
    reply.raise_for_status()
    return random.random()
"""
STEPS = 8


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    line = ["train", "agent.py:solve", "--tasks", "tasks.jsonl", "--quiet", *arguments]
    return subprocess.Popen(
        [sys.executable, "-m", "whet", *line],
        cwd=folder,
        # As where the command is started by a process that uses W&B itself.
        env={**os.environ, "WANDB_SERVICE": "3-1-unix-/no/such/socket"},
        stderr=subprocess.PIPE,
        text=True,
    )


def steps(file: Path) -> list[int]:
    if not file.exists():
        return []
    text = file.read_text()
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [line["step"] for line in lines if line["kind"] == "step"]


def test_every_step_is_tracked_once_however_often_the_run_is_killed(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('"one"\n"two"\n')
    run = tmp_path / ".whet" / "runs" / "killed"
    small = ["--tasks-per-step=1", "--group-size=2", f"--steps={STEPS}", "--trainer.weights=full"]
    trackers = ["--tracking.names=jsonl,tensorboard,wandb", "--tracking.wandb-mode=offline"]
    arguments = ["--name=killed", *small, *trackers]
    for point in (2, 5):
        with start(tmp_path, *arguments) as process:
            deadline = time.monotonic() + 300
            while len(steps(run / "metrics.jsonl")) < point:
                assert process.poll() is None, process.stderr and process.stderr.read()
                assert time.monotonic() < deadline, "the run does not get on"
                time.sleep(0.01)
            process.kill()
        arguments = ["--resume", "killed"]
    with start(tmp_path, *arguments) as process:
        _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err

    assert steps(run / "metrics.jsonl") == list(range(1, STEPS + 1))
    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    assert [event.step for event in found.Scalars("reward")] == list(range(1, STEPS + 1))
    assert [step for step, _ in read_wandb(run).steps] == list(range(1, STEPS + 1))
