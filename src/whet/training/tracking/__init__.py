"""Trackers, which send a run's metrics to files and services, each in a thread of its own.

A tracker's package is imported when the config names it. A slow or failing tracker neither stops
training nor delays it.
"""

import importlib.util
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from whet.config import TrackingConfig
from whet.errors import ConfigError, MissingExtra, WhetError, boundary
from whet.io.files import JsonLines
from whet.io.text import hide_passwords
from whet.protocols import Tracker
from whet.training.tracking.run import TrackedRun
from whet.types import Metrics

logger = logging.getLogger(__name__)

PACKAGES = {
    "jsonl": (),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}
"""Packages that each tracker needs; the extra `tracking` installs all of them."""

CLOSE_TIMEOUT_S = 60.0
"""Seconds that the end of a run waits for a slow tracker."""


class TrackerFailed(WhetError):
    """A tracker raised: reported once, and the run continues."""


def check_trackers(config: TrackingConfig) -> None:
    """Check the configured trackers before a run is made.

    Raises:
        MissingExtra: one cannot be imported.
        ConfigError: the run's folder would keep a password.
    """
    if config.mlflow_uri and urlsplit(config.mlflow_uri).password is not None:
        raise ConfigError(
            "the run's folder would keep the password in tracking.mlflow_uri: set the variable "
            "MLFLOW_TRACKING_URI instead"
        )
    for name in config.names:
        for package in PACKAGES[name]:
            if importlib.util.find_spec(package) is None:
                raise MissingExtra.build(f"tracking with {name} ({package})", "tracking")


def build_tracker(name: str, config: TrackingConfig, run: TrackedRun) -> Tracker:
    """Build a tracker by name. Raises ConfigError if it cannot start."""
    match name:
        case "tensorboard":
            from whet.training.tracking.tensorboard import TensorBoardTracker  # noqa: PLC0415

            return TensorBoardTracker(run)
        case "wandb":
            from whet.training.tracking.wandb import WandbTracker  # noqa: PLC0415

            return WandbTracker(config, run)
        case "mlflow":
            from whet.training.tracking.mlflow import MlflowTracker  # noqa: PLC0415

            return MlflowTracker(config, run)
        case _:
            return JsonlTracker(run)


class JsonlTracker(Tracker):
    """`metrics.jsonl`: a line for the config, one a step, one for each result."""

    def __init__(self, run: TrackedRun) -> None:
        self._lines = JsonLines(run.folder / "metrics.jsonl")
        known = list(self._lines.read())
        self.last_step = max((line.get("step", 0) for line in known), default=0)
        self._last_kind = known[-1].get("kind") if known else None
        if not known:
            self._add("config", {"run": run.name, "config": run.config})

    def step(self, step: int, metrics: Metrics) -> None:
        self._add("step", {"step": step, **metrics})
        self.last_step = step

    def finish(self, result: Metrics) -> None:
        # A finished run that is resumed without more steps has its result already.
        if self._last_kind != "result":
            self._add("result", result)

    def close(self) -> None:
        pass

    def _add(self, kind: str, values: Mapping[str, object]) -> None:
        self._last_kind = kind
        self._lines.append({"kind": kind, "at": round(time.time(), 3), **values})


class Tracking:
    """Sends a run's metrics to all its trackers."""

    def __init__(self, trackers: Mapping[str, Tracker], warn: Callable[[str], None]) -> None:
        self._workers = [_Worker(name, tracker, warn) for name, tracker in trackers.items()]
        self._warn = warn

    def step(self, step: int, metrics: Metrics) -> None:
        """Record a step, 1 for the first. Trackers that have the step already skip it."""
        for worker in self._workers:
            worker.submit_step(step, dict(metrics))

    def finish(self, result: Metrics) -> None:
        """Record the result of the run."""
        for worker in self._workers:
            worker.submit(lambda tracker: tracker.finish(dict(result)))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait until everything is recorded; blocks. A tracker that takes too long is abandoned."""
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            if not worker.wait(timeout_s):
                self._warn(f"tracking with {worker.name} takes too long and is left unfinished")


class _Worker:
    """A tracker in its thread."""

    def __init__(self, name: str, tracker: Tracker, warn: Callable[[str], None]) -> None:
        self.name = name
        self._tracker = tracker
        self._warn = warn
        self._last_step = tracker.last_step
        self._failures = 0
        self._queue = queue.SimpleQueue[Callable[[Tracker], None] | None]()
        self._thread = threading.Thread(target=self._run, name=f"whet-tracking-{name}", daemon=True)
        self._thread.start()

    def submit_step(self, step: int, metrics: Metrics) -> None:
        if step > self._last_step:
            self._last_step = step
            self.submit(lambda tracker: tracker.step(step, metrics))

    def submit(self, work: Callable[[Tracker], None]) -> None:
        self._queue.put(work)

    def end(self) -> None:
        self._queue.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Whether the thread ends within the timeout."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            self._try(work)
        self._try(lambda tracker: tracker.close())
        if self._failures > 1:
            self._warn(f"tracking with {self.name} failed {self._failures} times in all")

    def _try(self, work: Callable[[Tracker], None]) -> None:
        try:
            with boundary(TrackerFailed, f"tracking with {self.name} failed"):
                work(self._tracker)
        except WhetError as error:
            self._failures += 1
            logger.debug("tracker failed", exc_info=True)
            if self._failures == 1:
                reason = hide_passwords(" ".join(str(error).split()))
                self._warn(f"{reason}; training continues")
