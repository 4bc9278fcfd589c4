"""Requests that are held until something happens, or nobody is there to hear of it."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

from anyio import CancelScope, create_task_group
from starlette.requests import Request

from whet.errors import StoreClosed, StoreError

T = TypeVar("T")


class Holding:
    """All requests that wait. They end at once when their client leaves or the server closes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = set[tuple[asyncio.AbstractEventLoop, CancelScope]]()
        self._closing = False

    async def hold(self, request: Request, wait: Callable[[], Awaitable[T]]) -> T:
        """What `wait` gives. Raises StoreClosed if there is nobody to give it to."""
        result: T | StoreError = _closing()
        async with create_task_group() as tasks:
            with self._among_held(tasks.cancel_scope):
                tasks.start_soon(_cancel_when_gone, request, tasks.cancel_scope)
                try:
                    result = await wait()
                except StoreError as error:  # as it is: a task group would wrap it
                    result = error
                tasks.cancel_scope.cancel()
        if isinstance(result, StoreError):
            raise result
        return result

    @contextmanager
    def _among_held(self, scope: CancelScope) -> Generator[None]:
        me = (asyncio.get_running_loop(), scope)
        with self._lock:
            if self._closing:
                scope.cancel()
            self._held.add(me)
        try:
            yield
        finally:
            with self._lock:
                self._held.discard(me)

    def __len__(self) -> int:
        return len(self._held)

    def close(self) -> None:
        """End every wait, from any thread. Idempotent."""
        with self._lock:
            self._closing = True
            for loop, scope in self._held:
                loop.call_soon_threadsafe(scope.cancel)


def _closing() -> StoreClosed:
    return StoreClosed("the store is closing: ask again")


async def _cancel_when_gone(request: Request, scope: CancelScope) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
