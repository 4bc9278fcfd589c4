"""Requests that go in batches: nobody is left without an answer."""

import asyncio
from collections.abc import Sequence

import anyio
import pytest

from whet.errors import StoreError
from whet.store.http.batching import LANES, Batcher

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("turns", range(5))
async def test_whoever_comes_when_all_lanes_end_at_once_is_sent_too(turns: int) -> None:
    held: list[asyncio.Future[None]] = []

    async def send(items: Sequence[str]) -> Sequence[str]:
        if len(held) < LANES:
            held.append(asyncio.get_running_loop().create_future())
            await held[-1]
        return items

    batcher = Batcher[str, str](send, is_refusal=lambda error: False)
    first = [asyncio.create_task(batcher.add("first"))]
    while len(held) < LANES:
        await asyncio.sleep(0)
        if len(held) == len(first) < LANES:
            first.append(asyncio.create_task(batcher.add("first")))
    for each in held:
        each.set_result(None)
    for _ in range(turns):
        await asyncio.sleep(0)
    with anyio.fail_after(5):
        assert await batcher.add("late") == "late"
        assert await asyncio.gather(*first) == ["first"] * LANES


async def test_an_answer_that_is_none_is_an_error_for_all_of_its_batch() -> None:
    async def send(items: Sequence[str]) -> Sequence[str]:
        return items[1:]

    batcher = Batcher[str, str](send, is_refusal=lambda error: False)
    with anyio.fail_after(5):
        answers = await asyncio.gather(*map(batcher.add, "ab"), return_exceptions=True)
    assert [type(answer) for answer in answers] == [StoreError, StoreError]
