"""Waiting without polling, across threads and event loops."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress

EVERYONE = "*"
"""A key that all listeners hear."""


def work_in(run: str) -> str:
    """Rung when something in the run may have become claimable."""
    return f"work/{run}"


def end_of(run: str, id_: str) -> str:
    """Rung when a rollout or an attempt of the run has ended."""
    return f"end/{run}/{id_}"


class Listener:
    """Someone who waits in an event loop for some keys."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._heard = set[str]()

    async def wait(self) -> set[str]:
        """What was rung since the last time; waits for the first."""
        await self._event.wait()
        with self._lock:
            self._event.clear()
            heard, self._heard = self._heard, set[str]()
        return heard

    def hear(self, keys: Iterable[str]) -> None:
        """Called by the bell, under its lock, from any thread."""
        awake = bool(self._heard)
        self._heard.update(keys)
        if not awake:
            with suppress(RuntimeError):  # its loop was closed under it
                self._loop.call_soon_threadsafe(self._event.set)


class Bell:
    """Wakes who listens for a key, in whatever event loop they do.

    The writer marks keys inside a transaction and rings them after the commit, so whoever
    wakes finds what they were woken for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners = defaultdict[str, set[Listener]](set)
        self._marked = set[str]()

    @contextmanager
    def listening(self, keys: Iterable[str]) -> Generator[Listener]:
        """Hear every ring from now on: look first, and only then wait."""
        listener = Listener(self._lock)
        wanted = {*keys, EVERYONE}
        with self._lock:
            for key in wanted:
                self._listeners[key].add(listener)
        try:
            yield listener
        finally:
            with self._lock:
                for key in wanted:
                    self._listeners[key].discard(listener)
                    if not self._listeners[key]:
                        del self._listeners[key]

    def mark(self, key: str) -> None:
        """Ring it at the next `ring_marked`."""
        self._marked.add(key)

    @property
    def marked(self) -> frozenset[str]:
        return frozenset(self._marked)

    def ring_marked(self) -> None:
        """Ring what was marked."""
        if self._marked:
            marked, self._marked = self._marked, set[str]()
            self.ring(marked)

    def ring(self, keys: Iterable[str] = (EVERYONE,)) -> None:
        """Wake those who listen for any of the keys."""
        with self._lock:
            for key in keys:
                for listener in self._listeners.get(key, ()):
                    listener.hear((key,))
