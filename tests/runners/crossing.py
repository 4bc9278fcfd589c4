"""What a test and the agents it runs tell each other: those are in another thread."""

import threading

import anyio


class Flag:
    """Something that has happened."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        while not self._event.is_set():
            await anyio.sleep(0.005)


class Count:
    """How often something has happened."""

    def __init__(self) -> None:
        self._semaphore = threading.Semaphore(0)

    def release(self) -> None:
        self._semaphore.release()

    async def acquire(self) -> None:
        while not self._semaphore.acquire(blocking=False):
            await anyio.sleep(0.005)
