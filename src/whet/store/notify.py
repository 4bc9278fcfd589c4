"""Change notification across threads and event loops, so that waiting needs no polling."""

import threading
from collections import defaultdict
from collections.abc import Generator, Iterable
from contextlib import contextmanager

from whet.io.threads import LoopEvent, set_all

ALL = "*"
"""A key that every subscription receives."""


def work_key(run: str) -> str:
    """The key notified when a rollout of the run may have become claimable."""
    return f"work/{run}"


def end_key(run: str, id_: str) -> str:
    """The key notified when a rollout or an attempt of the run has ended."""
    return f"end/{run}/{id_}"


class Subscription:
    """Keys that a task of an event loop waits for."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self.event = LoopEvent()
        """Set once a key was received."""
        self._received = set[str]()

    async def wait(self) -> set[str]:
        """Wait until a key was notified; returns all keys notified since the last call."""
        await self.event.wait()
        with self._lock:
            self.event.clear()
            received, self._received = self._received, set[str]()
        return received

    def receive(self, key: str) -> bool:
        """Receive a key, under the notifier's lock; returns whether the event is to be set."""
        is_first = not self._received
        self._received.add(key)
        return is_first


class Notifier:
    """Wakes subscriptions by key, in any event loop.

    The writer marks keys inside a transaction and flushes them after its commit, so that a
    subscriber that wakes up finds the change in the database.
    """

    def __init__(self) -> None:
        self.marked = set[str]()
        """Keys to notify at the next `flush`. Used by the writer's thread only."""
        self._lock = threading.Lock()
        self._subscriptions = defaultdict[str, set[Subscription]](set)

    @contextmanager
    def subscribe(self, keys: Iterable[str]) -> Generator[Subscription]:
        """Receive every notification from now on: subscribe first, then read, then wait."""
        subscription = Subscription(self._lock)
        wanted = {*keys, ALL}
        with self._lock:
            for key in wanted:
                self._subscriptions[key].add(subscription)
        try:
            yield subscription
        finally:
            with self._lock:
                for key in wanted:
                    self._subscriptions[key].discard(subscription)
                    if not self._subscriptions[key]:
                        del self._subscriptions[key]

    def mark(self, key: str) -> None:
        """Notify a key at the next `flush`."""
        self.marked.add(key)

    def flush(self) -> None:
        """Notify the marked keys."""
        marked, self.marked = self.marked, set[str]()
        self.notify(marked)

    def notify(self, keys: Iterable[str] = (ALL,)) -> None:
        """Wake every subscription to one of the keys."""
        with self._lock:
            woken = [
                subscription.event
                for key in keys
                for subscription in self._subscriptions.get(key, ())
                if subscription.receive(key)
            ]
        set_all(woken)
