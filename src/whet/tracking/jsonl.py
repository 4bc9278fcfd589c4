"""Numbers as JSON lines in the run's folder: what any other tool can read."""

import time
from collections.abc import Mapping

from whet.jsonlines import JsonLines
from whet.protocols import Tracker
from whet.tracking.run import TrackedRun
from whet.types import Metrics


class JsonlTracker(Tracker):
    """`metrics.jsonl`: a line for the config, one a step, one for the result."""

    def __init__(self, run: TrackedRun) -> None:
        self._lines = JsonLines(run.folder / "metrics.jsonl")
        known = list(self._lines.read())
        self.last_step = max((line.get("step", 0) for line in known), default=0)
        self._kinds = {line.get("kind") for line in known}
        if "config" not in self._kinds:
            self._add("config", {"run": run.name, "config": run.config})

    def step(self, step: int, metrics: Metrics) -> None:
        self._add("step", {"step": step, **metrics})
        self.last_step = step

    def finish(self, result: Metrics) -> None:
        # A finished run that is resumed has nothing new to say.
        if "result" not in self._kinds:
            self._add("result", result)

    def close(self) -> None:
        pass

    def _add(self, kind: str, values: Mapping[str, object]) -> None:
        self._kinds.add(kind)
        self._lines.append({"kind": kind, "at": round(time.time(), 3), **values})
