"""The example with a planner and a worker: two policies, one reward."""

from pathlib import Path

import pytest

from support.runs.commands import report, run


@pytest.mark.slow
def test_the_pair_is_trained_and_a_frozen_policy_is_not(tmp_path: Path) -> None:
    place = ("--dir", str(tmp_path), "--steps", "3")  # one may have nothing to learn from
    run("planner_worker/train.py", *place, "--name", "pair")
    run("planner_worker/train.py", *place, "--name", "worker", "--train", "worker")
    assert report(tmp_path, "pair")["failed_rollouts"] == 0
    models = {
        name: {folder.name for folder in (tmp_path / "runs" / name / "model").iterdir()}
        for name in ("pair", "worker")
    }
    assert models == {"pair": {"planner", "worker"}, "worker": {"worker"}}
