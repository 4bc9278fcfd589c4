"""The contract of every tracker, read back with the library it writes for. None needs a network."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import JsonValue

from support.runs.readers import Written, read_jsonl, read_mlflow, read_tensorboard, read_wandb
from whet.config import TrackingConfig
from whet.errors import ConfigError
from whet.protocols import Tracker
from whet.training.tracking import build_tracker
from whet.training.tracking.run import TrackedRun

CONFIG: dict[str, JsonValue] = {
    "model": "tiny",
    "steps": 3,
    "name": None,
    "adam": {"lr": 0.25},
    "selection": {"a": []},
}
STANDING = {
    "reward": 0.5,
    "mismatch_kl": 1e-7,
    "clip_fraction": 0.125,
    "staleness": 0.0,
    "calls_per_row": 2.5,
    "zero_signal_fraction": 0.25,
    "entropy": 1.5,
    "trained_tokens": 1771.0,
    "collect_seconds": 4.5,
    "train_seconds": 0.5,
}
RESULT = {"trained/greedy": 1.0, "gain/greedy": 0.625}

TRACKERS = {
    "jsonl": read_jsonl,
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    # Nobody listens there: a library that asked would fail.
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    return TrackedRun("mine", folder, CONFIG)


def metrics_of(step: int) -> dict[str, float]:
    return {**STANDING, "reward": step / 4}


# MLflow makes its tables by fifty migrations, and its own code is deprecated by SQLAlchemy.
each_tracker = pytest.mark.parametrize(
    ("name", "read"),
    [
        pytest.param(
            name,
            read,
            marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
            if name == "mlflow"
            else [],
        )
        for name, read in TRACKERS.items()
    ],
)


def build(name: str, run: TrackedRun) -> Tracker:
    return build_tracker(name, TrackingConfig(wandb_mode="offline"), run)


@pytest.mark.slow
@each_tracker
def test_a_run_in_two_processes_is_tracked_as_one(
    name: str, read: Callable[[Path], Written], run: TrackedRun
) -> None:
    first = build(name, run)
    assert first.last_step == 0
    for step in (1, 2):
        first.step(step, metrics_of(step))
    first.close()

    second = build(name, run)
    assert second.last_step == 2
    second.step(3, metrics_of(3))
    assert second.last_step == 3
    second.finish(RESULT)
    second.close()

    written = read(run.folder)
    deadline = time.monotonic() + 20
    while name == "wandb" and len(written.steps) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)  # its own process writes the file, and answers a little ahead of the disk
        written = read(run.folder)
    assert [step for step, _ in written.steps] == [1, 2, 3]
    for step, values in written.steps:
        assert values == pytest.approx(metrics_of(step), rel=1e-6)
    assert written.result == pytest.approx(RESULT)
    if name == "mlflow":
        assert written.config["adam.lr"] == "0.25"
    else:
        assert written.config["adam"] == {"lr": 0.25}
    assert str(written.config["steps"]) == "3"


@pytest.mark.parametrize("name", ["jsonl", "tensorboard"])
def test_a_record_cut_off_by_a_kill_is_written_again(name: str, run: TrackedRun) -> None:
    tracker = build(name, run)
    for step in (1, 2):
        tracker.step(step, metrics_of(step))
    tracker.close()
    file = max(run.folder.rglob("metrics.jsonl" if name == "jsonl" else "events.*"))
    file.write_bytes(file.read_bytes()[:-5])

    again = build(name, run)
    assert again.last_step == 1
    again.step(2, metrics_of(2))
    again.close()
    assert [step for step, _ in TRACKERS[name](run.folder).steps] == [1, 2]


def test_a_finished_run_that_is_resumed_has_one_result(run: TrackedRun) -> None:
    for _ in range(2):
        tracker = build("jsonl", run)
        tracker.finish(RESULT)
        tracker.close()
    assert read_jsonl(run.folder).result == RESULT


def test_a_finished_run_that_takes_more_steps_has_a_result_after_them(run: TrackedRun) -> None:
    for step, result in ((1, {"steps": 1.0}), (2, {"steps": 2.0})):
        tracker = build("jsonl", run)
        tracker.step(step, metrics_of(step))
        tracker.finish(result)
        tracker.close()
    lines = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    results = [line["steps"] for line in lines if line["kind"] == "result"]
    assert results == [1, 2]


@pytest.mark.slow
def test_a_password_in_the_address_of_mlflow_is_in_no_message(
    run: TrackedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ConfigError, match="MLflow cannot start") as raised:
        build_tracker("mlflow", TrackingConfig(), run)
    assert "secret" not in str(raised.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_password_in_the_config_reaches_no_tracker_that_others_may_read(
    tmp_path: Path, run: TrackedRun, name: str
) -> None:
    url = "http://ann:Pa55word@127.0.0.1:8000"
    run = TrackedRun("mine", run.folder, {"engine": {"urls": [url]}})
    build(name, run).close()
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"127.0.0.1:8000" in written
    assert b"Pa55word" not in written
