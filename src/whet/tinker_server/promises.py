"""What was asked for and will be done: answers that clients come back for."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pydantic import JsonValue

from whet.errors import NotFound, RequestError, WhetError

logger = logging.getLogger(__name__)

Reply = bytes | dict[str, JsonValue]
"""A protocol buffer, or JSON."""

KEPT_S = 600.0
"""How long an answer that was given is kept, for a client whose connection broke."""
UNCLAIMED_S = 7200.0
"""How long one is kept that nobody came for."""


@dataclass
class _Promise:
    task: asyncio.Task[Reply]
    cancellable: bool
    gone_at: float = math.inf


class Promises:
    """Work under way and done, by the id of its request. For one event loop."""

    def __init__(self) -> None:
        self._promises: dict[str, _Promise] = {}

    def make(
        self, id: str, work: Callable[[], Awaitable[Reply]], *, cancellable: bool = False
    ) -> None:
        """Begin work, unless the same request came before: clients send one again."""
        self._sweep()
        if id in self._promises:
            return
        task = asyncio.get_running_loop().create_task(_answered(work))
        promise = self._promises[id] = _Promise(task, cancellable)

        def done(task: asyncio.Task[Reply]) -> None:
            promise.gone_at = time.monotonic() + UNCLAIMED_S

        task.add_done_callback(done)

    async def wait(self, id: str, seconds: float) -> Reply | None:
        """The answer, or None if it takes longer. Raises NotFound."""
        promise = self._promises.get(id)
        if promise is None:
            raise NotFound(f"there is no request {id!r:.100}: the server was started again since")
        task = promise.task
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            return None
        promise.gone_at = min(promise.gone_at, time.monotonic() + KEPT_S)
        if task.cancelled():
            return {"error": "the request was cancelled", "category": "user"}
        return task.result()

    def cancel(self, id: str) -> None:
        """Stop work that nobody waits for any more, where that leaves nothing half done."""
        promise = self._promises.get(id)
        if promise is not None and promise.cancellable:
            promise.task.cancel()

    def _sweep(self) -> None:
        now = time.monotonic()
        for id in [id for id, promise in self._promises.items() if promise.gone_at < now]:
            del self._promises[id]


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
        self._waiting: dict[int, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncGenerator[None]:
        """Wait for the turn of a number, and end it.

        Raises:
            RequestError: it has been, and must not be again.
            NotFound: it will never come: the line was closed.
        """
        if number < self._next:
            raise RequestError(f"request {number} was done, and its answer is no longer kept")
        if number > self._next:
            turn = self._waiting[number] = asyncio.get_running_loop().create_future()
            await turn
        try:
            yield
        finally:
            self._next = number + 1
            if following := self._waiting.pop(self._next, None):
                following.set_result(None)

    def close(self) -> None:
        """Send everybody away who still waits."""
        for turn in self._waiting.values():
            turn.set_exception(NotFound("the session of this training run has ended"))
        self._waiting.clear()
