"""What was asked for and will be done: answers that clients come back for."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from pydantic import JsonValue

from whet.errors import NotFound, RequestError, WhetError

logger = logging.getLogger(__name__)

Reply = bytes | dict[str, JsonValue]
"""A protocol buffer, or JSON."""

KEPT_S = 600.0
"""How long an answer that was given is kept, for a client whose connection broke."""
UNCLAIMED_S = 7200.0
"""How long one is kept that nobody came for."""


class Promises:
    """Work under way and done, by the id of its request. For one event loop."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Reply]] = {}
        self._gone_at: dict[str, float] = {}

    def make(self, id: str, work: Callable[[], Awaitable[Reply]]) -> None:
        """Begin work, unless the same request came before: clients send one again."""
        self._sweep()
        if id in self._tasks:
            return

        async def run() -> Reply:
            try:
                return await _answered(work)
            finally:
                self._gone_at[id] = time.monotonic() + UNCLAIMED_S

        self._tasks[id] = asyncio.get_running_loop().create_task(run())

    async def wait(self, id: str, seconds: float) -> Reply | None:
        """The answer, or None if it takes longer. Raises NotFound."""
        task = self._tasks.get(id)
        if task is None:
            raise NotFound(f"there is no request {id!r}: the server was started again since")
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            return None
        self._gone_at[id] = min(self._gone_at.get(id, 0), time.monotonic() + KEPT_S)
        if task.cancelled():
            return {"error": "the request was cancelled", "category": "user"}
        return task.result()

    def cancel(self, id: str) -> None:
        """Stop work that nobody waits for any more."""
        if task := self._tasks.get(id):
            task.cancel()

    def _sweep(self) -> None:
        now = time.monotonic()
        for id in [id for id, at in self._gone_at.items() if at < now]:
            del self._gone_at[id], self._tasks[id]


async def _answered(work: Callable[[], Awaitable[Reply]]) -> Reply:
    """The answer; an error as the client's own kind of it."""
    try:
        return await work()
    except (RequestError, NotFound) as error:
        return {"error": str(error), "category": "user"}
    except WhetError as error:
        logger.error("request failed error=%s", error)
        return {"error": str(error), "category": "server"}
    except Exception as error:
        logger.exception("request failed")
        return {"error": f"{type(error).__name__}: {error}", "category": "server"}


class Line:
    """Does what one client asks for in the order of its numbers, from 1, however it arrives."""

    def __init__(self) -> None:
        self._next = 1
        self._waiting: dict[int, asyncio.Event] = {}

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncGenerator[None]:
        """Wait for the turn of a number, and end it."""
        if number > self._next:
            await self._waiting.setdefault(number, asyncio.Event()).wait()
        try:
            yield
        finally:
            self._next = max(self._next, number + 1)
            if event := self._waiting.pop(self._next, None):
                event.set()
