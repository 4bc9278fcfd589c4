"""Work in the thread of the event loop that asks for it, as long as that is quick.

Most commits and most reads of one attempt take less than it takes to wake a thread for them, which
then fights with the loop for the interpreter's lock, on another processor that has seen none of it.
"""

import math
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

QUICK_S = 0.005
"""How long an event loop may be held up."""
REST = 10
"""If it was held up longer, nothing is done in it for so many times as long."""


class Here:
    """Who uses a connection: a thread, or an event loop as long as that is quick."""

    def __init__(self, *, allowed: bool = True) -> None:
        self.in_use = threading.Lock()
        """Held by whoever uses the connection."""
        self._allowed_from = 0.0 if allowed else math.inf

    @contextmanager
    def turn(self) -> Generator[bool]:
        """Says whether the connection may be used here and now."""
        began = time.monotonic()
        may = began >= self._allowed_from and self.in_use.acquire(timeout=QUICK_S)
        try:
            yield may
        finally:
            if may:
                self.in_use.release()
            took_s = time.monotonic() - began
            if took_s > QUICK_S:
                self.forbid(took_s * REST)

    def forbid(self, seconds: float = math.inf) -> None:
        """Leave everything to the thread."""
        self._allowed_from = max(self._allowed_from, time.monotonic() + seconds)
