"""Long polling: requests that are held until there is a result, or no client to receive it."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

from anyio import CancelScope, create_task_group
from starlette.requests import Request

from whet.errors import StoreClosed, StoreError
from whet.io.threads import call_in_loop

T = TypeVar("T")


class LongPolls:
    """All held requests. They end at once when their client disconnects or the server closes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = set[tuple[asyncio.AbstractEventLoop, CancelScope]]()
        self._closing = False

    async def wait(self, request: Request, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work`. Raises StoreClosed when the server or client closes."""
        result: T | StoreError = StoreClosed("the store is closing: send the request again")
        async with create_task_group() as tasks:
            with self._register(tasks.cancel_scope):
                tasks.start_soon(_cancel_on_disconnect, request, tasks.cancel_scope)
                try:
                    result = await work()
                except StoreError as error:  # returned, since a task group would wrap it
                    result = error
                tasks.cancel_scope.cancel()
        if isinstance(result, StoreError):
            raise result
        return result

    @contextmanager
    def _register(self, scope: CancelScope) -> Generator[None]:
        entry = (asyncio.get_running_loop(), scope)
        with self._lock:
            if self._closing:
                scope.cancel()
            self._held.add(entry)
        try:
            yield
        finally:
            with self._lock:
                self._held.discard(entry)

    def __len__(self) -> int:
        return len(self._held)

    def close(self) -> None:
        """End every wait, from any thread. Idempotent."""
        with self._lock:
            self._closing = True
            for loop, scope in self._held:
                call_in_loop(loop, scope.cancel)


async def _cancel_on_disconnect(request: Request, scope: CancelScope) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
