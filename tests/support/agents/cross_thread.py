"""Signals between a test and the agents it runs, which are in another thread or process."""

import threading
from collections.abc import Callable

import anyio


async def until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds: another thread or process cannot wake the test's loop."""
    while not condition():  # noqa: ASYNC110 - see above
        await anyio.sleep(0.005)


class Flag:
    """An event that any thread may set."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.set = self._event.set

    async def wait(self) -> None:
        await until(self._event.is_set)


class Count:
    """A semaphore that any thread may release."""

    def __init__(self) -> None:
        self._semaphore = threading.Semaphore(0)
        self.release = self._semaphore.release

    async def acquire(self) -> None:
        await until(lambda: self._semaphore.acquire(blocking=False))
