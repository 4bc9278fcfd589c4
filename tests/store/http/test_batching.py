"""Batching of small writes: every item gets its result."""

import asyncio
from collections.abc import Coroutine, Sequence
from types import NoneType
from typing import Any

import anyio
import pytest

from whet.errors import StoreClosed, StoreError
from whet.store.http.batching import SENDERS, Batcher
from whet.store.http.errors import ErrorDetail
from whet.store.http.transport import Unreachable

pytestmark = pytest.mark.anyio


def echo(item: str) -> ErrorDetail:
    return ErrorDetail(code="echo", message=item)


@pytest.mark.parametrize("turns", range(5))
async def test_an_item_added_when_all_senders_end_at_once_is_sent_too(turns: int) -> None:
    held: list[asyncio.Future[None]] = []

    async def send(items: Sequence[str]) -> Sequence[ErrorDetail]:
        if len(held) < SENDERS:
            held.append(asyncio.get_running_loop().create_future())
            await held[-1]
        return [echo(item) for item in items]

    batcher = Batcher(send, asyncio.create_task)
    first = [asyncio.create_task(batcher.add("first"))]
    while len(held) < SENDERS:
        await asyncio.sleep(0)
        if len(held) == len(first) < SENDERS:
            first.append(asyncio.create_task(batcher.add("first")))
    for each in held:
        each.set_result(None)
    for _ in range(turns):
        await asyncio.sleep(0)
    with anyio.fail_after(5):
        assert await batcher.add("late") == echo("late")
        assert await asyncio.gather(*first) == [echo("first")] * SENDERS


async def test_a_response_of_the_wrong_length_is_an_error_for_all_of_its_batch() -> None:
    async def send(items: Sequence[str]) -> Sequence[ErrorDetail]:
        return [echo(item) for item in items[1:]]

    batcher = Batcher(send, asyncio.create_task)
    with anyio.fail_after(5):
        results = await asyncio.gather(*map(batcher.add, "ab"), return_exceptions=True)
    assert [type(result) for result in results] == [StoreError, StoreError]


async def test_an_invalid_item_is_refused_without_those_beside_it() -> None:
    sent: list[Sequence[str]] = []

    async def send(items: Sequence[str]) -> Sequence[None]:
        sent.append(items)
        if "bad" in items:
            raise StoreError("one is invalid")
        return [None for _ in items]

    batcher = Batcher(send, asyncio.create_task)
    items = ["good", "bad", "good"]
    with anyio.fail_after(5):
        results = await asyncio.gather(*map(batcher.add, items), return_exceptions=True)
    assert [type(result) for result in results] == [NoneType, StoreError, NoneType]
    assert items in sent


async def test_an_unreachable_store_fails_a_batch_at_once() -> None:
    sent: list[Sequence[str]] = []

    async def send(items: Sequence[str]) -> Sequence[None]:
        sent.append(items)
        raise Unreachable("no response")

    batcher = Batcher(send, asyncio.create_task)
    with anyio.fail_after(5):
        results = await asyncio.gather(*map(batcher.add, "abc"), return_exceptions=True)
    assert [type(result) for result in results] == [Unreachable] * 3
    assert sent == [["a", "b", "c"]]


async def test_items_that_wait_while_the_client_closes_raise_store_closed() -> None:
    senders: list[asyncio.Task[None]] = []

    async def send(items: Sequence[str]) -> Sequence[None]:
        await anyio.sleep_forever()
        return []

    def start(sender: Coroutine[Any, Any, None]) -> None:
        senders.append(asyncio.create_task(sender))

    batcher = Batcher(send, start)
    added: list[asyncio.Task[ErrorDetail | None]] = []
    for _ in range(SENDERS + 2):  # two that no sender has taken
        added.append(asyncio.create_task(batcher.add("item")))
        await anyio.wait_all_tasks_blocked()
    for sender in senders:
        sender.cancel()
    with anyio.fail_after(5):
        results = await asyncio.gather(*added, return_exceptions=True)
    assert {type(result) for result in results} == {StoreClosed}
