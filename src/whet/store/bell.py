"""Waiting without polling, across threads and event loops."""

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress


class Bell:
    """Wakes all who listen, in whatever event loop they do.

    The writer thread marks it inside a transaction and rings it after the commit, so whoever
    wakes finds what they were woken for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._marked = False

    @contextmanager
    def listening(self) -> Generator[asyncio.Event]:
        """An event that every ring sets: clear it, look, and only then wait for it."""
        listener = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._listeners.add(listener)
        try:
            yield listener[1]
        finally:
            with self._lock:
                self._listeners.discard(listener)

    def mark(self) -> None:
        """Ring at the next `ring_if_marked`."""
        self._marked = True

    def ring_if_marked(self) -> None:
        if self._marked:
            self._marked = False
            self.ring()

    def ring(self) -> None:
        with self._lock:
            for loop, event in self._listeners:
                with suppress(RuntimeError):  # its loop was closed under it
                    loop.call_soon_threadsafe(event.set)
