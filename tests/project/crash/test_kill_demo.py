"""`whet demo` killed at any moment, or stopped by Ctrl-C, resumes from its last step."""

import json
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from support.runs.run_audit import audit
from whet.app.cli.demo import DEMOS
from whet.app.run_folder import RunFolder

pytestmark = pytest.mark.slow

STEPS, TASKS_PER_STEP, GROUP_SIZE = 6, 4, 4
TRAINING = STEPS * TASKS_PER_STEP * GROUP_SIZE
SMALL = [f"--steps={STEPS}", f"--tasks-per-step={TASKS_PER_STEP}", f"--group-size={GROUP_SIZE}"]


@contextmanager
def start(directory: Path, *arguments: str) -> Generator[subprocess.Popen[str]]:
    """`whet demo` at work; killed at the end of the block if it still is."""
    run = subprocess.Popen(
        [sys.executable, "-m", "whet", "demo", "--dir", str(directory), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A suite started in the background ignores Ctrl-C, and its children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with run:
        try:
            yield run
        finally:
            run.kill()


def ended_rollouts(store: Path) -> int:
    """Count the ended rollouts of a run, read from outside."""
    if not store.exists():
        return 0
    db = sqlite3.connect(f"file:{store}?mode=ro", uri=True)
    try:
        ended = "SELECT count(*) FROM rollout WHERE status IN ('succeeded', 'failed')"
        return db.execute(ended).fetchone()[0]
    except sqlite3.OperationalError:  # its tables are being made
        return 0
    finally:
        db.close()


def wait_for(run: subprocess.Popen[str], store: Path, rollouts: int) -> None:
    deadline = time.monotonic() + 900  # a busy machine is slow, not stuck
    while ended_rollouts(store) < rollouts:
        assert run.poll() is None, run.stderr and run.stderr.read()
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.01)


def test_a_demo_killed_at_three_random_points_loses_nothing(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # noqa: T201 - to repeat a failure
    draw = random.Random(seed)
    folder = RunFolder(tmp_path / "runs" / "killed")
    held_out = 400
    points = [
        draw.randrange(0, held_out),  # while the base model is evaluated, or before
        held_out + draw.randrange(1, TRAINING),  # in training
        held_out + draw.randrange(1, TRAINING + held_out),  # in training or after it
    ]
    arguments = ["--name", "killed", *SMALL]
    for point in sorted(points):
        with start(tmp_path, *arguments, f"--gateway.processes={draw.randrange(3)}") as run:
            wait_for(run, folder.store, point)
            time.sleep(draw.uniform(0, 0.5))  # anywhere in a step: sampling, training, saving
        # Killed before it was a run at all: there is nothing to resume, so it is started.
        arguments = ["--resume", "killed"] if folder.config_file.exists() else arguments

    with start(tmp_path, *arguments, "--json") as run:
        out, err = run.communicate(timeout=1200)

    assert run.returncode == 0, err
    report = json.loads(out.splitlines()[-1])
    assert report["steps"] == STEPS
    assert report["rollouts"] == TRAINING
    assert report["unproven_generations"] == 0
    tasks, test = DEMOS["arithmetic"].tasks(folder.read_config())
    assert 2 * len(test) == held_out
    steps = anyio.run(audit, folder, tasks, test)
    assert sum(step.metrics["rows"] for step in steps) == report["rows"] > 0
    assert {path.name for path in folder.checkpoints.iterdir()} == {steps[-1].checkpoint}


@pytest.mark.parametrize(
    ("rollouts", "how"), [(0, signal.SIGINT), (20, signal.SIGTERM), (401, signal.SIGINT)]
)
def test_a_signal_stops_it_cleanly_and_it_says_how_to_go_on(
    tmp_path: Path, rollouts: int, how: signal.Signals
) -> None:
    folder = RunFolder(tmp_path / "runs" / "stopped")
    with start(tmp_path, "--name", "stopped", *SMALL) as run:
        wait_for(run, folder.store, rollouts)
        assert run.stdout
        assert f"run {folder.path}" in run.stdout.readline()
        run.send_signal(how)
        out, err = run.communicate(timeout=60)

    assert run.returncode == 130
    assert "Traceback" not in out
    if not rollouts and not folder.path.exists():  # before anything was sampled
        assert err == "whet: stopped before it began; start it again with the same command\n"
        return
    assert err == (
        f"whet: stopped; continue with: whet demo arithmetic --resume stopped --dir {tmp_path}\n"
    )
    with folder.lock():
        pass  # nothing of it is left running
