"""A run that was interrupted at any point resumes as if it had not been."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import anyio
import httpx
import pytest
from pydantic import JsonValue

from support.runs.processes import find_gateways
from support.runs.run_audit import audit
from whet.app.cli.display import Display
from whet.app.experiment import Result
from whet.app.run_folder import RunFolder
from whet.app.train import run_training
from whet.config import RunConfig
from whet.errors import ConfigError, TrainerError
from whet.types import Endpoint, StepRecord

TASKS: list[JsonValue] = [f"say {word}" for word in ("one", "two", "three", "four")]
HELD_OUT: list[JsonValue] = ["say five", "say six"]
EVALUATION = 2 * len(HELD_OUT)
STEP = 2 * 4


class Stop(Exception):
    """Whatever ends a process."""


class Breaking(Display):
    """Breaks the run off when `when` says so of how far it has come."""

    def __init__(self, when: Callable[[str, int, int], bool] = lambda *_: False) -> None:
        self._when = when
        self._phase = ""
        self._outcomes = 0
        self._steps = 0

    def note(self, text: str) -> None:
        pass

    def show_phase(self, name: str, rollouts: int) -> None:
        self._phase, self._outcomes = name, 0
        self._break_off()

    def count_ended(self, count: int) -> None:
        self._outcomes += count
        self._break_off()

    def show_step(self, record: StepRecord, steps: int) -> None:
        self._steps = record.step + 1
        self._phase, self._outcomes = "committed", 0
        self._break_off()

    def _break_off(self) -> None:
        if self._when(self._phase, self._steps, self._outcomes):
            raise Stop


async def ask(task: str, llm: Endpoint) -> float:
    # No certificates: reading them takes longer than all the rest.
    async with httpx.AsyncClient(base_url=llm.base_url + "/", timeout=60, verify=False) as client:
        reply = await client.post(
            "chat/completions",
            headers={"Authorization": f"Bearer {llm.api_key}"},
            json={
                "model": llm.model,
                "messages": [{"role": "user", "content": task}],
                "max_tokens": 8,
            },
        )
    # Any difference between samples will do as a reward.
    return len(reply.json()["choices"][0]["message"]["content"] or "") / 40


class KillingGateways(Breaking):
    """Kills the gateways of the run when its outcomes come to some numbers."""

    def __init__(self, *outcomes: int) -> None:
        super().__init__()
        self._due = list(outcomes)
        self._total = 0
        self.killed = 0

    def count_ended(self, count: int) -> None:
        self._total += count
        if self._due and self._total >= self._due[0]:
            for gateway in find_gateways(os.getpid()):
                os.kill(gateway, signal.SIGKILL)
                self.killed += 1
            if self.killed:
                self._due.pop(0)


def new_run(
    directory: Path, loop: str = "on_policy", gateways: int | None = None, **updates: int
) -> RunFolder:
    settings = {
        "dir": directory,
        "steps": 3,
        "tasks_per_step": 2,
        "group_size": 4,
        "trainer": {"weights": "full"},
        "adam": {"lr": 1e-4},
        "runner": {"concurrency": 3},
        "gateway": {"processes": gateways},
        "loop": {"name": loop, **updates},
    }
    return RunFolder.create(RunConfig.model_validate(settings), "test")


def go(folder: RunFolder, display: Display) -> Result:
    return anyio.run(run_training, ask, TASKS, HELD_OUT, folder, display)


def test_a_run_broken_off_again_and_again_loses_nothing_and_trains_nothing_twice(
    tmp_path: Path,
) -> None:
    folder = new_run(tmp_path)
    points: list[Callable[[str, int, int], bool]] = [
        lambda phase, step, done: phase == "evaluate before" and done >= 2,
        lambda phase, step, done: phase == "train" and done >= 3,
        lambda phase, step, done: phase == "committed" and step == 2,
        lambda phase, step, done: step == 2 and done >= 5,
        lambda phase, step, done: phase == "evaluate after" and done >= 1,
    ]
    for when in points:
        with pytest.raises(Stop):
            go(RunFolder(folder.path), Breaking(when))

    result = go(RunFolder(folder.path), Breaking())

    anyio.run(audit, folder, TASKS, HELD_OUT)
    assert result.total("rollouts") == 3 * STEP
    assert folder.report.exists()
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-000002"]


@pytest.mark.slow
def test_a_run_whose_gateways_are_killed_loses_nothing_and_blames_no_agent(tmp_path: Path) -> None:
    folder = new_run(tmp_path, gateways=2)
    display = KillingGateways(2, 7, 15)

    result = go(folder, display)

    assert display.killed >= 3
    anyio.run(audit, folder, TASKS, HELD_OUT)
    assert result.total("rollouts") == 3 * STEP
    assert result.total("failed_rollouts") == 0


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["on_policy", "overlapped"])
def test_several_updates_a_step_are_all_done_again_or_not_at_all(tmp_path: Path, loop: str) -> None:
    folder = new_run(tmp_path, loop, mini_batches=2, epochs=2)
    with pytest.raises(Stop):
        go(folder, Breaking(lambda phase, step, done: step >= 1 and done >= 2))

    go(RunFolder(folder.path), Breaking())

    steps = anyio.run(audit, folder, TASKS, HELD_OUT)
    assert steps[-1].version == sum(record.metrics.get("updates", 0) for record in steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "step", "done"), [("train", 0, 5), ("committed", 1, 0), ("train", 1, 1)]
)
def test_an_overlapped_run_loses_nothing_either(
    tmp_path: Path, phase: str, step: int, done: int
) -> None:
    def is_due(now: str, steps: int, outcomes: int) -> bool:
        # At least: how many rollouts end before the next step is trained is nobody's to say.
        return now == phase and steps >= step and outcomes >= done

    folder = new_run(tmp_path, loop="overlapped")
    with pytest.raises(Stop):
        go(folder, Breaking(is_due))

    result = go(RunFolder(folder.path), Breaking())

    steps = anyio.run(audit, folder, TASKS, HELD_OUT)
    assert result.total("rollouts") == 3 * STEP
    for metrics in [record.metrics for record in steps]:
        assert metrics["staleness_max"] <= 1
        # Fresh tokens score as they were sampled, and only stale ones may not.
        assert metrics["off_policy_fraction"] > 0 or metrics.get("logprob_gap", 0.0) < 1e-4


@pytest.mark.slow
def test_a_checkpoint_without_its_commit_did_not_happen(tmp_path: Path) -> None:
    folder = new_run(tmp_path)
    with pytest.raises(Stop):
        go(folder, Breaking(lambda phase, step, done: step == 1 and done >= 2))
    for left in ("step-000001", ".step-000001.partial"):
        (folder.checkpoints / left).mkdir()
        (folder.checkpoints / left / "weights.safetensors").write_bytes(b"half")

    go(folder, Breaking())

    anyio.run(audit, folder, TASKS, HELD_OUT)


def test_a_lost_checkpoint_is_reported_and_nothing_is_trained_on_top_of_the_wrong_weights(
    tmp_path: Path,
) -> None:
    folder = new_run(tmp_path)
    with pytest.raises(Stop):
        go(folder, Breaking(lambda phase, step, done: step == 1 and done >= 2))
    (folder.checkpoints / "step-000000" / "weights.safetensors").unlink()
    with pytest.raises(TrainerError, match="cannot read the checkpoint"):
        go(folder, Breaking())


def test_a_run_whose_store_is_gone_does_not_start_over(tmp_path: Path) -> None:
    folder = new_run(tmp_path)
    with pytest.raises(Stop):
        go(folder, Breaking(lambda phase, step, done: step == 1 and done >= 2))
    for file in tmp_path.rglob("store.db*"):
        file.unlink()
    with pytest.raises(ConfigError, match="had 1 step, its store has 0: restore the store"):
        go(folder, Breaking())


@pytest.mark.slow
def test_a_finished_run_is_only_looked_at(tmp_path: Path) -> None:
    folder = new_run(tmp_path)
    first = go(folder, Breaking()).as_json()
    again = go(folder, Breaking(lambda phase, step, done: done > 0)).as_json()
    assert again | {"seconds": 0} == first | {"seconds": 0}


def test_other_tasks_are_refused(tmp_path: Path) -> None:
    folder = new_run(tmp_path)
    with pytest.raises(Stop):
        go(folder, Breaking(lambda phase, step, done: done >= 2))
    with pytest.raises(ConfigError, match="the held-out tasks are not those"):
        anyio.run(run_training, ask, TASKS, [*HELD_OUT, "say seven"], folder, Breaking())
