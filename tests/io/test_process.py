"""Restarts with backoff, stop requests and free ports."""

import os
import signal
import socket

import anyio
import pytest

from whet.io.process import (
    RestartBackoff,
    find_free_port,
    handle_stop_signals,
    treat_sigterm_as_interrupt,
)
from whet.io.threads import run_async


def test_pauses_double_up_to_a_limit_and_deaths_in_a_row_give_up() -> None:
    backoff = RestartBackoff(first_pause_s=5, healthy_s=60)
    assert [backoff.count_death(lived_s=1) for _ in range(6)] == [5, 10, 20, 30, 30, None]


def test_a_healthy_process_resets_the_count() -> None:
    backoff = RestartBackoff(first_pause_s=1, healthy_s=60)
    assert [backoff.count_death(lived_s=1) for _ in range(2)] == [1, 2]
    assert backoff.count_death(lived_s=61) == 1
    assert backoff.deaths == 1


def test_a_free_port_can_be_listened_on() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", find_free_port()))


def test_a_signal_requests_the_stop_and_cancels_the_block() -> None:
    async def work() -> bool:
        async with handle_stop_signals() as stop:
            with anyio.fail_after(20), stop.cancel_on_request():
                os.kill(os.getpid(), signal.SIGTERM)
                await anyio.sleep_forever()
            os.kill(os.getpid(), signal.SIGTERM)  # right after the first: it is part of it
            await anyio.sleep(0.01)
            return stop.requested.is_set()

    assert run_async(work)


@pytest.mark.parametrize("sigint", [signal.default_int_handler, signal.SIG_IGN])
def test_sigterm_cancels_what_runs_as_ctrl_c_does_even_where_that_is_ignored(
    sigint: signal.Handlers,
) -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await anyio.sleep(20)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # right after the first: it is part of it
            ended.append("cleaned up")

    before = signal.signal(signal.SIGINT, sigint), signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt), treat_sigterm_as_interrupt():
            run_async(work)
    finally:
        signal.signal(signal.SIGINT, before[0])
    assert ended == ["cleaned up"]
    assert signal.getsignal(signal.SIGTERM) == before[1]


def test_an_error_in_a_task_is_raised_without_its_group() -> None:
    async def fail() -> None:
        raise LookupError("mine")

    async def work() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)

    with pytest.raises(LookupError, match="mine"):
        run_async(work)
