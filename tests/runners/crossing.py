"""What a test and the agents it runs tell each other: those are in another thread or process."""

import threading
from collections.abc import Callable

import anyio


async def until(is_so: Callable[[], bool]) -> None:
    """Look until it is so: there is nothing that another thread or process could wake."""
    while not is_so():  # noqa: ASYNC110 - see above
        await anyio.sleep(0.005)


class Flag:
    """Something that has happened."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.set = self._event.set

    async def wait(self) -> None:
        await until(self._event.is_set)


class Count:
    """How often something has happened."""

    def __init__(self) -> None:
        self._semaphore = threading.Semaphore(0)
        self.release = self._semaphore.release

    async def acquire(self) -> None:
        await until(lambda: self._semaphore.acquire(blocking=False))
