"""The example `hello`: the model learns its identity, on every trainer."""

import json
from collections.abc import Generator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from support.runs.commands import at_work, free_store, report, run
from support.servers.tinker_serving import KEY, Server
from whet.demos.hello import identities

GOAL = 0.95


@pytest.mark.parametrize("tiny", [True, False])
def test_no_identity_is_both_trained_and_held_out(tiny: bool) -> None:
    train = {task["identity"] for task in identities("train", 512, 0, tiny=tiny)}
    test = {task["identity"] for task in identities("test", 100, 1, tiny=tiny)}
    assert len(train) == 512
    assert len(test) == 100
    assert not train & test


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of training in one process."""
    folder = tmp_path_factory.mktemp("local")
    run("hello/train.py", "oneclick", "--dir", str(folder), "--name", "local")
    return report(folder, "local")


@pytest.fixture(scope="module")
def at_tinker(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[str, ...]]:
    """The flags by which the same script trains at a server for the `tinker` client."""
    server = Server(tmp_path_factory.mktemp("tinker") / "dir")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", KEY)
        yield ("--backend", "tinker-server", "--tinker-url", server.url)
    server.stop()


@pytest.mark.slow
def test_the_tiny_model_learns_to_answer_with_its_identity(local: dict[str, Any]) -> None:
    assert local["before"]["greedy"] < 0.2
    assert local["after"]["greedy"] >= GOAL
    assert local["after"]["sampled"] >= GOAL


@pytest.mark.slow
def test_a_tinker_service_gives_the_same_curve_within_noise(
    local: dict[str, Any], at_tinker: tuple[str, ...], tmp_path: Path
) -> None:
    run(
        "hello/train.py",
        "oneclick",
        "--dir",
        str(tmp_path),
        "--name",
        "at",
        "--steps",
        "8",
        *at_tinker,
    )
    there = report(tmp_path, "at")
    assert there["before"]["greedy"] == pytest.approx(local["before"]["greedy"], abs=0.02)
    assert there["after"]["greedy"] >= GOAL
    # The curves of three seeds are within 0.06 of each other.
    assert fmean(there["rewards"]) == pytest.approx(fmean(local["rewards"][:8]), abs=0.15)


@pytest.mark.slow
def test_it_learns_the_same_in_four_processes(tmp_path: Path) -> None:
    learned = in_four_processes(tmp_path, "--steps", "8")
    assert learned["after"]["greedy"] >= GOAL
    assert learned["failed_rollouts"] == learned["unproven_generations"] == 0


@pytest.mark.slow
def test_a_tinker_service_trains_in_four_processes(
    at_tinker: tuple[str, ...], tmp_path: Path
) -> None:
    learned = in_four_processes(tmp_path, "--steps", "2", *at_tinker)
    assert learned["failed_rollouts"] == learned["unproven_generations"] == 0
    lines = (tmp_path / "runs" / "hello" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if line["kind"] == "step"]
    assert len(steps) == 2
    # What serves has followed: the second step was sampled by the weights of the first.
    assert [step["off_policy_fraction"] for step in steps] == [0, 0]
    assert max(step["logprob_gap"] for step in steps) < 1e-3


def in_four_processes(folder: Path, *flags: str) -> dict[str, Any]:
    place = ("--dir", str(folder), "--store", free_store(), *flags)
    with (
        at_work("hello/train.py", "store", *place, log=folder / "store.log"),
        at_work("hello/train.py", "serve", *place, log=folder / "serve.log"),
        at_work("hello/train.py", "runner", *place, log=folder / "runner.log"),
    ):
        run("hello/train.py", "algo", *place)
    return report(folder, "hello")
