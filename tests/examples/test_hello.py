from pathlib import Path

import pytest
from commands import at_work, free_store, report, run

from whet.demos.hello import identities

GOAL = 0.95


@pytest.mark.parametrize("tiny", [True, False])
def test_no_identity_is_both_trained_and_held_out(tiny: bool) -> None:
    train = {task["identity"] for task in identities("train", 512, 0, tiny=tiny)}
    test = {task["identity"] for task in identities("test", 100, 1, tiny=tiny)}
    assert len(train) == 512
    assert len(test) == 100
    assert not train & test


@pytest.mark.slow
def test_the_tiny_model_learns_to_answer_with_its_identity(tmp_path: Path) -> None:
    run("hello.py", "oneclick", "--dir", str(tmp_path), "--name", "local")
    learned = report(tmp_path, "local")
    assert learned["before"]["greedy"] < 0.2
    assert learned["after"]["greedy"] >= GOAL
    assert learned["after"]["sampled"] >= GOAL


@pytest.mark.slow
def test_it_learns_the_same_in_four_processes(tmp_path: Path) -> None:
    place = ("--dir", str(tmp_path), "--store", free_store())
    with (
        at_work("hello.py", "store", *place, log=tmp_path / "store.log"),
        at_work("hello.py", "serve", *place, log=tmp_path / "serve.log"),
        at_work("hello.py", "runner", *place, log=tmp_path / "runner.log"),
    ):
        run("hello.py", "algo", *place, "--steps", "8")
    learned = report(tmp_path, "hello")
    assert learned["after"]["greedy"] >= GOAL
    assert learned["failed_rollouts"] == learned["unproven_rows"] == 0
