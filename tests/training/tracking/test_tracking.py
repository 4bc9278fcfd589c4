"""A tracker that fails or hangs is reported once, and never stops or delays training."""

import importlib.util
import threading
import time
from pathlib import Path

import pytest

from whet.config import TrackingConfig
from whet.errors import ConfigError, MissingExtra
from whet.protocols import Tracker
from whet.training.tracking import Tracking, build_tracker, check_trackers
from whet.training.tracking.run import TrackedRun
from whet.types import Metrics


class Scripted(Tracker):
    """Records its calls, and raises or waits at some of them."""

    def __init__(
        self,
        *,
        last_step: int = 0,
        fails_at: tuple[int, ...] = (),
        gate: threading.Event | None = None,
    ) -> None:
        self.last_step = last_step
        self.received: list[object] = []
        self._fails_at = fails_at
        self._gate = gate

    def step(self, step: int, metrics: Metrics) -> None:
        if self._gate is not None:
            self._gate.wait(30)
        if step in self._fails_at:
            raise ConnectionError("the network\nis gone")
        self.received.append(step)

    def finish(self, result: Metrics) -> None:
        self.received.append(dict(result))

    def close(self) -> None:
        self.received.append("closed")


def test_every_tracker_gets_the_steps_it_does_not_have() -> None:
    new, resumed = Scripted(), Scripted(last_step=2)
    tracking = Tracking({"new": new, "resumed": resumed}, warn=pytest.fail)
    for step in (1, 2, 3):
        tracking.step(step, {"reward": 0.5})
    tracking.finish({"gain": 1.0})
    tracking.close()
    assert new.received == [1, 2, 3, {"gain": 1.0}, "closed"]
    assert resumed.received == [3, {"gain": 1.0}, "closed"]


def test_a_tracker_that_fails_is_reported_once_and_tried_again() -> None:
    warned: list[str] = []
    shaky, other = Scripted(fails_at=(2, 3)), Scripted()
    tracking = Tracking({"shaky": shaky, "other": other}, warn=warned.append)
    for step in (1, 2, 3, 4):
        tracking.step(step, {})
    tracking.close()
    assert shaky.received == [1, 4, "closed"]
    assert other.received == [1, 2, 3, 4, "closed"]
    assert warned == [
        "tracking with shaky failed: ConnectionError: the network is gone; training continues",
        "tracking with shaky failed 2 times in all",
    ]


def test_a_tracker_that_hangs_delays_nothing() -> None:
    warned: list[str] = []
    gate = threading.Event()
    tracking = Tracking({"stuck": Scripted(gate=gate)}, warn=warned.append)
    began = time.monotonic()
    for step in range(1, 100):
        tracking.step(step, {})
    tracking.close(timeout_s=0.1)
    assert time.monotonic() - began < 5
    assert warned == ["tracking with stuck takes too long and is left unfinished"]
    gate.set()


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "wandb" else real(name)
    )
    check_trackers(TrackingConfig(names=("jsonl", "tensorboard", "mlflow")))
    with pytest.raises(MissingExtra, match=r"pip install .*\[tracking\]'"):
        check_trackers(TrackingConfig(names=("jsonl", "wandb")))


def test_an_address_with_a_password_is_refused_before_it_is_saved() -> None:
    check_trackers(TrackingConfig(mlflow_uri="postgresql://ann@127.0.0.1/mlflow"))
    with pytest.raises(ConfigError, match="set the variable MLFLOW_TRACKING_URI"):
        check_trackers(TrackingConfig(mlflow_uri="http://ann:secret@127.0.0.1:5000"))


def test_wandb_without_an_account_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    run = TrackedRun("mine", tmp_path, {})
    with pytest.raises(ConfigError, match=r"set tracking\.wandb_mode to 'offline'"):
        build_tracker("wandb", TrackingConfig(wandb_mode="online"), run)
