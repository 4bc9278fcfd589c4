"""What an event loop does for itself, and what it leaves to the store's threads."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import anyio
import pytest

from whet.errors import StoreError, boundary
from whet.store import here as quickness
from whet.store.database import Bulk, Db
from whet.store.jobs import Inbox, Job
from whet.store.reader import Reader
from whet.store.sqlite import SQLiteStore
from whet.store.writer import Writer
from whet.types import Rollout, Status

pytestmark = pytest.mark.anyio

MINUTE = 60.0


class Clock:
    """Is asked for the time within every transaction, and may take its own."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.asked_in: list[str] = []

    def __call__(self) -> float:
        self.asked_in.append(threading.current_thread().name)
        time.sleep(self.delay_s)
        return time.time()

    def where(self) -> set[str]:
        """The threads that asked since the last time."""
        asked, self.asked_in = set(self.asked_in), []
        return asked


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(tmp_path: Path, clock: Clock) -> AsyncGenerator[SQLiteStore]:
    async with SQLiteStore(tmp_path / "store.db", clock=clock) as store:
        yield store


async def claim(store: SQLiteStore) -> object:
    return await store.claim("w", lease_s=MINUTE, wait_s=0)


async def test_a_loop_commits_what_is_quick_and_leaves_the_rest_to_the_thread(
    store: SQLiteStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickness, "QUICK_S", 0.4)  # on a busy machine little is quick
    monkeypatch.setattr(quickness, "REST", 2)
    here = threading.current_thread().name
    await claim(store)
    assert clock.where() == {here}
    await store.enqueue([Rollout(id="a", task=None, group="g")])  # there may be very many
    assert clock.where() == {"whet-store-writer"}
    clock.delay_s = 0.5
    await claim(store)
    assert clock.where() == {here}
    clock.delay_s = 0.0
    await claim(store)
    assert clock.where() == {"whet-store-writer"}
    with anyio.fail_after(30):
        while clock.where() != {here}:
            await anyio.sleep(0.1)
            await claim(store)


async def test_no_loop_is_held_up_by_another_process(tmp_path: Path, store: SQLiteStore) -> None:
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    gaps: list[float] = []
    async with anyio.create_task_group() as group:
        group.start_soon(claim, store)
        last = time.monotonic()
        for _ in range(100):
            await anyio.sleep(0.001)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
        other.execute("COMMIT")
    other.close()
    assert sorted(gaps)[-3] < 0.05


async def test_a_lease_that_a_loop_gave_runs_out_though_nobody_writes(store: SQLiteStore) -> None:
    await store.enqueue([Rollout(id="a", task=None, group="g", max_attempts=1)])
    attempt = await store.claim("w", lease_s=0.2, wait_s=0)
    assert attempt is not None
    with anyio.fail_after(10):
        assert await store.ended(attempt.id) is Status.FAILED


async def test_a_commit_that_is_interrupted_is_undone_and_told() -> None:
    class Interrupted(BaseException):
        pass

    def act(db: Db, run: str, numbers: Sequence[int]) -> Sequence[None]:
        for number in numbers:
            db.execute("INSERT INTO number VALUES (?)", (number,))
        if 1 in numbers:
            raise Interrupted
        return [None] * len(numbers)

    def begin_now(db: Db) -> bool:
        db.execute("BEGIN")
        return True

    db = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
    db.execute("CREATE TABLE number (n)")
    writer = Writer(db, upkeep=lambda db: None, committed=lambda: None, begin_now=begin_now)
    said: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: said.append(context.get("exception"))
    )
    with pytest.raises(StoreError, match="interrupted"):
        await writer.write(Bulk(act, "run", 1))
    await writer.write(Bulk(act, "run", 2))
    assert db.execute("SELECT n FROM number").fetchall() == [(2,)]
    assert [type(each) for each in said] == [Interrupted]
    writer.close()


async def test_a_loop_reads_only_what_is_small() -> None:
    db = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
    reader = Reader(db, lambda: boundary(StoreError, "store"))

    def where(db: Db) -> str:
        return threading.current_thread().name

    assert await reader.read(where, small=True) == threading.current_thread().name
    assert await reader.read(where, small=False) == "whet-store-reader"
    reader.close()


async def test_what_a_loop_goes_on_asking_for_is_gathered() -> None:
    done: list[list[int]] = []

    def do(jobs: Sequence[Job[int]]) -> bool:
        done.append([job.work for job in jobs])
        for job in jobs:
            job.future.set_result(None)
        return True

    inbox = Inbox[int](do, gather_s=MINUTE)
    asked: list[asyncio.Future[None]] = []
    for number in range(3):
        asked.append(inbox.ask(number))
        await asyncio.sleep(0)
    await asyncio.gather(*asked)
    await inbox.ask(3)
    assert done == [[0, 1, 2], [3]]
