"""Callbacks and futures between threads and event loops."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine

import anyio
import pytest

from whet.io.threads import (
    SWITCH_INTERVAL_S,
    call_in_loop,
    resolve_all,
    run_async,
    shorten_thread_turns,
)

pytestmark = pytest.mark.anyio


async def test_a_callback_from_another_thread_runs_in_the_loop() -> None:
    loop, ran = asyncio.get_running_loop(), asyncio.Event()
    scheduled: list[bool] = []
    thread = threading.Thread(target=lambda: scheduled.append(call_in_loop(loop, ran.set)))
    thread.start()
    await asyncio.wait_for(ran.wait(), 10)
    thread.join()
    assert scheduled == [True]


def test_a_closed_loop_is_reported_and_runs_nothing() -> None:
    loop, calls = asyncio.new_event_loop(), list[int]()
    loop.close()
    assert not call_in_loop(loop, calls.append, 1)
    assert calls == []


async def test_futures_are_resolved_from_another_thread() -> None:
    loop = asyncio.get_running_loop()
    one, two, canceled = (loop.create_future() for _ in range(3))
    canceled.cancel()
    resolutions = [(one, 1), (two, ValueError("two")), (canceled, 3)]
    thread = threading.Thread(target=resolve_all, args=(resolutions,))
    thread.start()
    assert await asyncio.wait_for(one, 10) == 1
    with pytest.raises(ValueError, match="two"):
        await two
    assert canceled.cancelled()
    thread.join()


def test_futures_of_a_closed_loop_are_left_alone() -> None:
    loop = asyncio.new_event_loop()
    future = loop.create_future()
    loop.close()
    resolve_all([(future, 1)])
    assert not future.done()


def test_threads_take_short_turns_for_a_while() -> None:
    interval_s = sys.getswitchinterval()
    with shorten_thread_turns():
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    assert sys.getswitchinterval() == interval_s


def test_the_last_of_blocks_with_short_turns_restores_the_interval() -> None:
    interval_s = sys.getswitchinterval()
    first, second = shorten_thread_turns(), shorten_thread_turns()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == interval_s


def test_a_process_that_is_interrupted_twice_at_once_stops_its_work_once() -> None:
    ended: list[bool] = []

    async def work() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        try:
            await anyio.sleep(30)
        finally:
            signal.raise_signal(signal.SIGINT)  # `timeout` signals the process, then its group
            ended.append(True)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_async(work)
    assert ended == [True]
    assert signal.getsignal(signal.SIGINT) is handler


def test_handlers_of_a_program_get_every_interrupt_and_stay() -> None:
    received: list[int] = []

    def receive(number: int, frame: object) -> None:
        received.append(number)

    async def interrupt_twice() -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    async def install() -> None:
        signal.signal(signal.SIGINT, receive)

    before = signal.signal(signal.SIGINT, receive)
    try:
        run_async(interrupt_twice)
        assert received == [signal.SIGINT] * 2
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run_async(install)
        assert signal.getsignal(signal.SIGINT) is receive
    finally:
        signal.signal(signal.SIGINT, before)


def run_with_asyncio(work: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(work())


@pytest.mark.parametrize("run_outer", [run_with_asyncio, run_async])
def test_work_inside_a_running_loop_is_canceled_by_the_first_interrupt(
    run_outer: Callable[[Callable[[], Coroutine[None, None, None]]], None],
) -> None:
    ended: list[str] = []

    async def work() -> None:
        await anyio.sleep(0.1)  # the other thread waits by then
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await anyio.sleep(3)
            ended.append("not canceled")
        finally:
            ended.append("ended")

    async def main() -> None:
        run_async(work)

    with pytest.raises(KeyboardInterrupt):
        run_outer(main)
    assert ended == ["ended"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_work_runs_inside_a_loop_of_another_thread_than_the_main_one() -> None:
    async def work() -> str:
        return "done"

    async def run_inside() -> str:
        return run_async(work)

    async def main() -> str:
        return await asyncio.to_thread(asyncio.run, run_inside())

    assert asyncio.run(main()) == "done"
