"""Futures: requests that clients submit and poll for results."""

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

FutureResult = bytes | dict[str, JsonValue]
"""A protocol buffer, or JSON."""

RETRIEVED_TTL_S = 600.0
"""Time a retrieved result is kept, for a client whose connection broke."""
UNRETRIEVED_TTL_S = 7200.0
"""Time a result is kept that was never retrieved."""

MISSING_S = 10.0
"""Time that requests wait for one that has not come; a client sends them one after another."""


@dataclass
class _Future:
    task: asyncio.Task[FutureResult]
    cancellable: bool
    expires_at: float = math.inf


class Futures:
    """Running and finished work by request id; used from one event loop."""

    def __init__(self) -> None:
        self._futures: dict[str, _Future] = {}

    def start(
        self, id: str, work: Callable[[], Awaitable[FutureResult]], *, cancellable: bool = False
    ) -> None:
        """Start work unless the same request was submitted before: clients resend requests."""
        self._sweep()
        if id in self._futures:
            return
        task = asyncio.get_running_loop().create_task(_run_work(work))
        future = self._futures[id] = _Future(task, cancellable)

        def set_expiry(task: asyncio.Task[FutureResult]) -> None:
            future.expires_at = time.monotonic() + UNRETRIEVED_TTL_S

        task.add_done_callback(set_expiry)

    async def wait(self, id: str, seconds: float) -> FutureResult | None:
        """Return the result, or None after `seconds`. Raises NotFound."""
        future = self._futures.get(id)
        if future is None:
            raise NotFound(f"unknown request {id!r:.100}: the server was restarted")
        task = future.task
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            return None
        future.expires_at = min(future.expires_at, time.monotonic() + RETRIEVED_TTL_S)
        if task.cancelled():
            return {"error": "the request was canceled", "category": "user"}
        return task.result()

    def cancel(self, id: str) -> None:
        """Cancel work whose client has gone, if it is cancellable."""
        future = self._futures.get(id)
        if future is not None and future.cancellable:
            future.task.cancel()

    def cancel_all(self, prefix: str) -> None:
        """Cancel the cancellable work whose ids begin with a prefix."""
        for id in [id for id in self._futures if id.startswith(prefix)]:
            self.cancel(id)

    def abandon(self, prefix: str) -> None:
        """Cancel such work and forget it: a client that comes back submits it again."""
        for id, future in [*self._futures.items()]:
            if id.startswith(prefix) and future.cancellable and not future.task.done():
                future.task.cancel()
                del self._futures[id]

    def _sweep(self) -> None:
        now = time.monotonic()
        for id in [id for id, future in self._futures.items() if future.expires_at < now]:
            del self._futures[id]


async def _run_work(work: Callable[[], Awaitable[FutureResult]]) -> FutureResult:
    """Run work and return its result; errors become the client's error format."""
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


class SequenceLock:
    """Runs the requests of a client in the order of their numbers, from 1.

    A client numbers a request before it has built it, so a number may never come. The numbers
    after it wait for it for a while only.
    """

    def __init__(self, missing_s: float = MISSING_S) -> None:
        self._missing_s = missing_s
        self._next = 1
        self._skipped: list[range] = []
        """Numbers that did not come in time; one that comes later is not kept waiting."""
        self._is_running = False
        self._idle_since = time.monotonic()
        self._waiting: dict[int, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def wait_turn(self, number: int) -> AsyncGenerator[None]:
        """Wait for the turn of a number; the next number follows when the block ends.

        Raises:
            RequestError: the number was used before.
            NotFound: the lock was closed.
        """
        if any(number in skipped for skipped in self._skipped):
            yield
            return
        if number < self._next:
            raise RequestError(f"request {number} is done and its result has expired")
        turn = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._start_next()
        try:
            await self._wait(number, turn)
            yield
        finally:
            if turn.done() and self._next == number:
                self._next, self._is_running = number + 1, False
                self._idle_since = time.monotonic()
                self._start_next()
            self._waiting.pop(number, None)

    async def _wait(self, number: int, turn: asyncio.Future[None]) -> None:
        """Wait for the turn, or until the numbers before it have been missing for too long."""
        arrived = time.monotonic()
        while not turn.done():
            left = max(arrived, self._idle_since) + self._missing_s - time.monotonic()
            if self._is_running or number > min(self._waiting):
                left = self._missing_s
            elif left <= 0:
                logger.warning("requests are missing numbers=%d to %d", self._next, number - 1)
                self._skipped.append(range(self._next, number))
                self._next = number
                self._start_next()
                continue
            await asyncio.wait([turn], timeout=left)
        turn.result()

    def _start_next(self) -> None:
        turn = self._waiting.get(self._next)
        if turn is not None and not self._is_running and not turn.done():
            self._is_running = True
            turn.set_result(None)

    def close(self) -> None:
        """Fail all waiting requests."""
        for turn in self._waiting.values():
            if not turn.done():
                turn.set_exception(NotFound("the session of this training run has ended"))
        self._waiting.clear()
