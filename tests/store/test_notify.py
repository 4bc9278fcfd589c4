"""Notifications across threads and event loops."""

import asyncio
import threading

import pytest

from whet.store.notify import ALL, Notifier

pytestmark = pytest.mark.anyio


async def test_a_subscription_receives_its_keys_from_another_thread() -> None:
    notifier = Notifier()
    with notifier.subscribe(["a", "b"]) as changes:
        thread = threading.Thread(target=notifier.notify, args=(["a", "other"],))
        thread.start()
        assert await asyncio.wait_for(changes.wait(), 10) == {"a"}
        thread.join()
        notifier.notify()
        assert await asyncio.wait_for(changes.wait(), 10) == {ALL}


async def test_keys_notified_before_a_wait_are_received_together() -> None:
    notifier = Notifier()
    with notifier.subscribe(["a", "b"]) as changes:
        notifier.notify(["a"])
        notifier.notify(["b"])
        assert await asyncio.wait_for(changes.wait(), 10) == {"a", "b"}


async def test_marked_keys_are_notified_by_a_flush() -> None:
    notifier = Notifier()
    with notifier.subscribe(["a"]) as changes:
        notifier.mark("a")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(changes.wait(), 0.05)
        notifier.flush()
        assert await asyncio.wait_for(changes.wait(), 10) == {"a"}
        assert notifier.marked == set()


async def test_a_subscription_ends_with_its_block() -> None:
    notifier = Notifier()
    with notifier.subscribe(["a"]) as changes:
        pass
    notifier.notify(["a"])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(changes.wait(), 0.05)
