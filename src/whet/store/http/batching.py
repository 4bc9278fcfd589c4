"""Many small requests as few larger ones, as group commit does on the other side."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from whet.errors import StoreError, WhetError, boundary

Item = TypeVar("Item")
Answer = TypeVar("Answer")

LANES = 3
"""Batches of a kind under way at once: with one, whoever comes just after it left waits twice."""
MAX_ITEMS = 256
MAX_BYTES = 4 * 2**20


class _Waiting(NamedTuple, Generic[Item, Answer]):
    item: Item
    size: int
    answer: asyncio.Future[Answer]

    def fail(self, error: WhetError) -> None:
        if not self.answer.done():
            self.answer.set_exception(type(error)(str(error)))


class Batcher(Generic[Item, Answer]):
    """Sends what has come together while all lanes were busy, in the order it came."""

    def __init__(
        self,
        send: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]],
        *,
        is_refusal: Callable[[WhetError], bool],
    ) -> None:
        """`send` gives an answer for each item; a refusal of a batch may be due to one of it."""
        self._send = send
        self._is_refusal = is_refusal
        self._waiting: list[_Waiting[Item, Answer]] = []
        self._senders = set[asyncio.Task[None]]()

    async def add(self, item: Item, size: int = 0) -> Answer:
        """The answer to one item; `size` is about what it has in bytes."""
        waiting = _Waiting[Item, Answer](item, size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if len(self._senders) < LANES:
            self._senders.add(asyncio.create_task(self._send_all()))
        return await waiting.answer

    async def _send_all(self) -> None:
        sender = asyncio.current_task()
        assert sender is not None
        try:
            while self._waiting:
                await self._send_some(self._take())
        finally:
            # In the same turn of the loop as the last look: whoever comes after it finds no lane
            # taken by one that sends no more.
            self._senders.discard(sender)

    def _take(self) -> list[_Waiting[Item, Answer]]:
        size, count = 0, 0
        for waiting in self._waiting[:MAX_ITEMS]:
            size += waiting.size
            if count and size > MAX_BYTES:
                break
            count += 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return [waiting for waiting in taken if not waiting.answer.done()]

    async def _send_some(self, batch: Sequence[_Waiting[Item, Answer]]) -> None:
        if not batch:
            return
        try:
            with boundary(StoreError, "the store's answer cannot be read"):
                answers = await self._send([waiting.item for waiting in batch])
                results = list(zip(batch, answers, strict=True))
        except WhetError as error:
            if len(batch) > 1 and self._is_refusal(error):
                for waiting in batch:  # one of them spoils it for the others
                    await self._send_some([waiting])
            else:
                for waiting in batch:
                    waiting.fail(error)
        else:
            for waiting, answer in results:
                if not waiting.answer.done():
                    waiting.answer.set_result(answer)
