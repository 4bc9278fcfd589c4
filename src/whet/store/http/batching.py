"""Batching of small writes: few large requests for many small ones, as group commit does."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from whet.errors import StoreClosed, StoreError, WhetError, boundary
from whet.io.threads import resolve_all
from whet.store.http.errors import ErrorDetail
from whet.store.http.transport import Unreachable

SENDERS = 3
"""Batches in flight at once: with one, an item that just missed a batch would wait for two."""
MAX_ITEMS = 256
MAX_BYTES = 4 * 2**20

Send = Callable[[Sequence[str]], Awaitable[Sequence[ErrorDetail | None]]]
"""Send items as JSON texts; return null or an error for each."""
Start = Callable[[Coroutine[Any, Any, None]], object]
"""Run a coroutine in the event loop that sends, from any thread. Raises StoreClosed."""


class _Pending(NamedTuple):
    item: str
    result: asyncio.Future[ErrorDetail | None]
    """Of the caller's event loop."""


class Batcher:
    """Sends the items that arrived while all senders were busy, in the order they came.

    Items come from any event loop. Handing one over wakes the loop that sends only if a sender is
    free, and the results of a batch wake each caller's loop once: a wake-up costs more than an
    item.
    """

    def __init__(self, send: Send, start: Start) -> None:
        self._send = send
        self._start = start
        self._lock = threading.Lock()
        self._pending: list[_Pending] = []
        self._senders = 0

    async def add(self, item: str) -> ErrorDetail | None:
        """Send one item in a batch and return its result. Raises StoreError."""
        pending = _Pending(item, asyncio.get_running_loop().create_future())
        with self._lock:
            self._pending.append(pending)
            has_free_sender = self._senders < SENDERS
            if has_free_sender:
                self._senders += 1
        if has_free_sender:
            self._start(self._send_all())
        return await pending.result

    async def _send_all(self) -> None:
        batch: list[_Pending] = []
        try:
            while batch := self._take_batch():
                await self._send_batch(batch)
        except asyncio.CancelledError:  # the client closes
            with self._lock:
                self._senders -= 1
                batch += self._pending
                self._pending = []
            resolve_all((each.result, StoreClosed("the store is closed")) for each in batch)
            raise

    def _take_batch(self) -> list[_Pending]:
        """Take the next items, at least one; without any, the sender that asks for them ends."""
        with self._lock:
            waiting = [each for each in self._pending if not each.result.done()]  # or canceled
            size, count = 0, 0
            for pending in waiting[:MAX_ITEMS]:
                size += len(pending.item)
                if count and size > MAX_BYTES:
                    break
                count += 1
            self._pending = waiting[count:]
            if not count:
                self._senders -= 1
            return waiting[:count]

    async def _send_batch(self, batch: Sequence[_Pending]) -> None:
        try:
            with boundary(StoreError, "the store's response cannot be read"):
                results = await self._send([pending.item for pending in batch])
                pairs = list(zip(batch, results, strict=True))
        except WhetError as error:
            if len(batch) > 1 and _is_refusal(error):
                for pending in batch:  # one of them is invalid, and the others are not
                    await self._send_batch([pending])
                return
            resolve_all((pending.result, type(error)(str(error))) for pending in batch)
        else:
            resolve_all((pending.result, result) for pending, result in pairs)


def _is_refusal(error: WhetError) -> bool:
    return isinstance(error, StoreError) and not isinstance(error, Unreachable | StoreClosed)
