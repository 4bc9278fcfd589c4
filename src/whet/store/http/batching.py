"""Batching of small writes: few large requests for many small ones, as group commit does."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from whet.errors import StoreClosed, StoreError, WhetError, boundary
from whet.store.http.errors import ErrorDetail
from whet.store.http.transport import Unreachable

SENDERS = 3
"""Batches in flight at once: with one, an item that just missed a batch would wait for two."""
MAX_ITEMS = 256
MAX_BYTES = 4 * 2**20

Send = Callable[[Sequence[str]], Awaitable[Sequence[ErrorDetail | None]]]
"""Send items as JSON texts; return null or an error for each."""


class _Pending(NamedTuple):
    item: str
    result: asyncio.Future[ErrorDetail | None]


class Batcher:
    """Sends the items that arrived while all senders were busy, in the order they came."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pending: list[_Pending] = []
        self._senders = set[asyncio.Task[None]]()

    async def add(self, item: str) -> ErrorDetail | None:
        """Send one item in a batch and return its result."""
        pending = _Pending(item, asyncio.get_running_loop().create_future())
        self._pending.append(pending)
        if len(self._senders) < SENDERS:
            self._senders.add(asyncio.create_task(self._send_all()))
        return await pending.result

    async def _send_all(self) -> None:
        sender = asyncio.current_task()
        assert sender is not None
        try:
            while self._pending:
                await self._send_batch(self._take_batch())
        finally:
            # In the same turn of the loop as the last look at the list: whoever adds an item after
            # that does not count a sender that sends no more.
            self._senders.discard(sender)

    def _take_batch(self) -> list[_Pending]:
        size, count = 0, 0
        for pending in self._pending[:MAX_ITEMS]:
            size += len(pending.item)
            if count and size > MAX_BYTES:
                break
            count += 1
        batch, self._pending = self._pending[:count], self._pending[count:]
        return [pending for pending in batch if not pending.result.done()]  # others were cancelled

    async def _send_batch(self, batch: Sequence[_Pending]) -> None:
        if not batch:
            return
        try:
            with boundary(StoreError, "the store's response cannot be read"):
                results = await self._send([pending.item for pending in batch])
                pairs = list(zip(batch, results, strict=True))
        except WhetError as error:
            if len(batch) > 1 and _is_refusal(error):
                for pending in batch:  # one of them is invalid, and the others are not
                    await self._send_batch([pending])
                return
            for pending in batch:
                if not pending.result.done():
                    pending.result.set_exception(type(error)(str(error)))
        else:
            for pending, result in pairs:
                if not pending.result.done():
                    pending.result.set_result(result)


def _is_refusal(error: WhetError) -> bool:
    return isinstance(error, StoreError) and not isinstance(error, Unreachable | StoreClosed)
