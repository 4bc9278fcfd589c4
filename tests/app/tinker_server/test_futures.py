"""The order of a client's requests, also of those that never come."""

from pathlib import Path

import anyio
import pytest

from support.clock import Clock
from whet.app.tinker_server.futures import FutureResult, SequenceLock
from whet.app.tinker_server.state import ServerState
from whet.app.tinker_server.storage import Session, Storage
from whet.errors import NotFound, RequestError

pytestmark = pytest.mark.anyio


class Client:
    """Requests under a lock, and the order in which they ran."""

    def __init__(self, missing_s: float) -> None:
        self.lock = SequenceLock(missing_s)
        self.ran: list[int] = []

    async def send(self, number: int, gate: anyio.Event | None = None) -> None:
        async with self.lock.wait_turn(number):
            if gate is not None:
                await gate.wait()
            self.ran.append(number)


async def test_requests_run_in_the_order_of_their_numbers() -> None:
    client, gate = Client(missing_s=60), anyio.Event()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            for number in (3, 1, 4, 2):
                tasks.start_soon(client.send, number, gate)
            gate.set()
    assert client.ran == [1, 2, 3, 4]
    with pytest.raises(RequestError, match="request 2 is done"):
        await client.send(2)


async def test_a_number_that_never_comes_gives_way_and_is_not_refused_later() -> None:
    client = Client(missing_s=0.05)
    with anyio.fail_after(10):
        await client.send(1)
        async with anyio.create_task_group() as tasks:
            for number in (6, 4, 3):
                tasks.start_soon(client.send, number)
        await client.send(2)
        await client.send(7)
    assert client.ran == [1, 3, 4, 6, 2, 7]


async def test_a_request_waits_as_long_as_the_one_before_it_runs() -> None:
    client, gate = Client(missing_s=0.01), anyio.Event()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.send, 1, gate)
            tasks.start_soon(client.send, 2)
            await anyio.sleep(0.1)
            assert client.ran == []
            gate.set()
    assert client.ran == [1, 2]


async def test_a_closed_lock_refuses_those_that_wait() -> None:
    client, refused = Client(missing_s=60), list[int]()

    async def wait() -> None:
        with pytest.raises(NotFound, match="session of this training run has ended"):
            await client.send(2)
        refused.append(2)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            client.lock.close()
    assert refused == [2]


async def test_samples_of_a_client_that_is_gone_are_stopped(tmp_path: Path) -> None:
    clock = Clock()
    state = ServerState([], Storage(tmp_path), clock=clock)
    stopped = anyio.Event()

    async def sample() -> FutureResult:
        try:
            await anyio.sleep_forever()
        finally:
            stopped.set()
        return {}

    for session in ("gone", "here"):
        state.begin_session(Session(id=session, created=0))
        state.futures.start(f"{session}:sample:0:1", sample, cancellable=True)
        assert await state.futures.wait(f"{session}:sample:0:1", 0) is None
    clock.now += 121
    state.touch("here")
    state.drop_inactive()
    with anyio.fail_after(10):
        await stopped.wait()
    assert await state.futures.wait("here:sample:0:1", 0) is None
    with pytest.raises(NotFound):  # so that the client submits it again
        await state.futures.wait("gone:sample:0:1", 0)
    state.futures.cancel("here:sample:0:1")
