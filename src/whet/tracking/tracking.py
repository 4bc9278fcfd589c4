"""All trackers of a run, each in a thread of its own: none stops training or holds it up."""

import logging
import queue
import threading
from collections.abc import Callable, Mapping

from whet.errors import WhetError, boundary
from whet.protocols import Tracker
from whet.types import Metrics

logger = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""How long the end of a run waits for a slow tracker."""


class TrackerFailed(WhetError):
    """A tracker raised: said once, and the run goes on."""


class Tracking:
    """Tells every tracker of a run what it does not know yet."""

    def __init__(self, trackers: Mapping[str, Tracker], warn: Callable[[str], None]) -> None:
        self._workers = [_Worker(name, tracker, warn) for name, tracker in trackers.items()]
        self._warn = warn

    def step(self, step: int, metrics: Metrics) -> None:
        """Say what a step came to; 1 is the first. A step that a tracker has is not told again."""
        for worker in self._workers:
            worker.tell_step(step, dict(metrics))

    def finish(self, result: Metrics) -> None:
        """Say what the run came to."""
        for worker in self._workers:
            worker.tell(lambda tracker: tracker.finish(dict(result)))

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Wait until all is told; blocks. A tracker that takes too long is left alone."""
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            if not worker.ended(patience_s):
                self._warn(f"tracking with {worker.name} takes too long and is left unfinished")


class _Worker:
    def __init__(self, name: str, tracker: Tracker, warn: Callable[[str], None]) -> None:
        self.name = name
        self._tracker = tracker
        self._warn = warn
        self._last_step = tracker.last_step
        self._failures = 0
        self._told = queue.SimpleQueue[Callable[[Tracker], None] | None]()
        self._thread = threading.Thread(
            target=self._work, name=f"whet-tracking-{name}", daemon=True
        )
        self._thread.start()

    def tell_step(self, step: int, metrics: Metrics) -> None:
        if step > self._last_step:
            self._last_step = step
            self.tell(lambda tracker: tracker.step(step, metrics))

    def tell(self, work: Callable[[Tracker], None]) -> None:
        self._told.put(work)

    def end(self) -> None:
        self._told.put(None)

    def ended(self, patience_s: float) -> bool:
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (work := self._told.get()) is not None:
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
                self._warn(f"{' '.join(str(error).split())}; training goes on")
