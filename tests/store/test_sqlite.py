"""The SQLite store beyond the contract: its file, its threads, its failures."""

import asyncio
import fcntl
import re
import sqlite3
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.store.records import call, claim, rollouts
from whet.errors import LeaseLost, StoreClosed, StoreError
from whet.store import DEFAULT_RUN
from whet.store.database import Db, WorkItem
from whet.store.queries.queue import Claim
from whet.store.schema import VERSION
from whet.store.sql_store import BatchedRead, SQLStore
from whet.store.sqlite import SQLiteDatabase, SQLiteStore
from whet.types import (
    AttemptId,
    Generation,
    Outcome,
    Reward,
    Rollout,
    Sampling,
    Status,
    StepRecord,
)

pytestmark = pytest.mark.anyio

MINUTE = 60.0
WON = Outcome(reward=1.0)
INT32 = st.integers(-(2**31), 2**31 - 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
async def store(path: Path) -> AsyncGenerator[SQLiteStore]:
    async with SQLiteStore(path) as store:
        yield store


# ------------------------------------------------------------------ the file


async def test_a_file_that_was_never_closed_has_everything(store: SQLiteStore, path: Path) -> None:
    await store.enqueue(rollouts("a", "b", "c"))
    a, b = await claim(store), await claim(store)
    await store.append(call(a.id, "first"))
    await store.emit(a.id, Reward(value=0.5))
    await store.finish(a.id, WON)
    record = StepRecord(step=0, version=1, checkpoint="c", consumed=("a",), metrics={"x": 1.5})
    await store.commit(record)

    async with SQLiteStore(path) as reopened:
        assert await reopened.steps() == [record]
        assert await reopened.trajectories(["a"]) == await store.trajectories(["a"])
        assert await reopened.attempt(b.id) == b
        assert await reopened.counts() == await store.counts()
        assert await reopened.release_workers() == 1
        assert [(await claim(reopened)).id for _ in range(2)] == ["b.2", "c.1"]


async def test_a_file_knows_its_version(store: SQLiteStore, path: Path) -> None:
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA user_version").fetchone() == (VERSION,)
    assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    db.close()


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
async def test_a_file_of_another_version_is_refused_in_one_line_and_left_alone(
    path: Path, version: int
) -> None:
    async with SQLiteStore(path) as store:
        await store.enqueue(rollouts("a"))
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(StoreError) as caught:
        SQLiteStore(path)
    assert re.fullmatch(
        rf"store '{path}' has schema version {version}, expected {VERSION}: open it with .*",
        str(caught.value),
    )
    db.execute(f"PRAGMA user_version = {VERSION}")
    db.close()
    async with SQLiteStore(path) as store:
        assert (await claim(store)).id == "a.1"


def test_a_foreign_database_is_refused_and_left_alone(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE theirs (x)")
    with pytest.raises(StoreError, match="not a store of whet"):
        SQLiteStore(path)
    assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]
    db.close()


def test_a_file_that_is_no_database_is_refused_in_one_line(path: Path) -> None:
    path.write_text("not a database at all, but long enough to look at" * 100)
    with pytest.raises(StoreError, match=r"cannot open the store .*not a database") as caught:
        SQLiteStore(path)
    assert "\n" not in str(caught.value)
    assert "not a database at all" in path.read_text()


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot open the store"):
        SQLiteStore(tmp_path / "nowhere" / "store.db")


def test_a_file_system_without_shared_memory_is_refused() -> None:
    with pytest.raises(StoreError, match="use a local disk"):
        SQLiteStore(":memory:")


async def test_a_late_report_is_kept(store: SQLiteStore) -> None:
    await store.enqueue(rollouts("a"))
    attempt = await claim(store)
    await store.finish(attempt.id, Outcome(reward=0.0))
    with pytest.raises(LeaseLost):
        await store.finish(attempt.id, WON)
    [record] = await store.attempts("a")
    assert (record.reward, record.late) == (0.0, (WON,))


# ------------------------------------------------------------------ threads


async def test_a_failing_change_does_not_undo_its_neighbors(store: SQLiteStore) -> None:
    await store.enqueue(rollouts("a"))
    attempt = await claim(store)
    refused: list[int] = []

    async def append(n: int) -> None:
        try:
            await store.append(call(attempt.id if n % 2 else AttemptId("nobody.1"), f"c{n}"))
        except StoreError:
            refused.append(n)

    async with anyio.create_task_group() as group:
        for n in range(20):
            group.start_soon(append, n)

    assert sorted(refused) == list(range(0, 20, 2))
    recorded = await store.calls(attempt.id)
    assert [c.id for c in recorded] == [f"c{n}" for n in range(1, 20, 2)]


async def test_a_value_that_does_not_fit_is_refused(store: SQLiteStore) -> None:
    await store.enqueue(rollouts("a"))
    attempt = await claim(store)
    with pytest.raises(StoreError, match="'huge' cannot be stored"):
        await store.append(call(attempt.id, "huge", tokens=(2**31,)))
    assert await store.calls(attempt.id) == []


async def test_a_full_disk_is_an_error_and_later_writes_go_on(
    store: SQLiteStore, caplog: pytest.LogCaptureFixture
) -> None:
    await store.enqueue(rollouts("a"))
    attempt = await claim(store)
    pages = await store._write(lambda db: db.execute("PRAGMA page_count").fetchone()[0])

    def limit(db: Db, most: int) -> None:
        db.execute(f"PRAGMA max_page_count = {most}")

    await store._write(lambda db: limit(db, pages + 2))
    with pytest.raises(StoreError, match="full"):
        await store.append(call(attempt.id, "big", tokens=(1,) * 100_000))
    await store._write(lambda db: limit(db, 10_000))
    await store.append(call(attempt.id, "big", tokens=(1,) * 100_000))
    assert [c.id for c in await store.calls(attempt.id)] == ["big"]


async def test_a_claim_canceled_during_its_commit_is_undone(path: Path) -> None:
    armed, inside, may_continue = threading.Event(), threading.Event(), threading.Event()

    def clock() -> float:
        if armed.is_set():
            inside.set()
            may_continue.wait(5)
        return 0.0

    async with SQLiteStore(path, clock=clock) as store:
        await store.enqueue([Rollout(id="a", task=None, group="g", max_attempts=1)])
        armed.set()
        async with anyio.create_task_group() as group:
            group.start_soon(claim, store)
            await to_thread.run_sync(inside.wait, 5)
            group.cancel_scope.cancel()
        armed.clear()
        may_continue.set()
        with anyio.fail_after(5):
            attempt = await store.claim("w", lease_s=MINUTE, wait_s=MINUTE)
        assert attempt is not None
        assert attempt.id == "a.1"
        assert (await store.counts())["attempts"] == 1


async def test_a_lease_expires_though_nothing_is_written(store: SQLiteStore) -> None:
    await store.enqueue([Rollout(id="a", task=None, group="g", max_attempts=1)])
    attempt = await store.claim("w", lease_s=0.2, wait_s=0)
    assert attempt is not None
    with anyio.fail_after(10):
        assert await store.ended(attempt.id) is Status.FAILED


async def test_a_file_locked_by_another_process_holds_up_no_event_loop(
    store: SQLiteStore, path: Path
) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    gaps: list[float] = []
    async with anyio.create_task_group() as group:
        group.start_soon(store.enqueue, rollouts("a"))
        last = time.monotonic()
        for _ in range(100):
            await anyio.sleep(0.001)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
        other.execute("COMMIT")
    other.close()
    assert sorted(gaps)[-3] < 0.05
    assert (await claim(store)).id == "a.1"


async def test_processes_with_one_file_write_in_turns(store: SQLiteStore, path: Path) -> None:
    async with anyio.create_task_group() as group:
        with path.with_name(f"{path.name}-turn").open() as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            group.start_soon(store.enqueue, rollouts("a"))
            await anyio.sleep(0.05)
            assert not await store.rollouts()
    assert (await claim(store)).id == "a.1"


async def test_several_event_loops_in_several_threads_share_a_store(store: SQLiteStore) -> None:
    """One loop hands out work, three do it: each is woken by the others' writes."""
    done: list[str] = []

    async def work() -> None:
        while attempt := await store.claim("w", lease_s=MINUTE, wait_s=MINUTE):
            if attempt.rollout.task == "stop":
                await store.finish(attempt.id, WON)
                return
            for n in range(3):
                await store.append(call(attempt.id, f"{attempt.id}-{n}"))
            assert len(await store.calls(attempt.id)) == 3
            await store.finish(attempt.id, WON)
            done.append(attempt.rollout.id)

    async def crew() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(work)

    threads = [threading.Thread(target=anyio.run, args=(crew,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    ids = [f"r{n}" for n in range(60)]
    with anyio.fail_after(20):
        for start in range(0, 60, 20):
            await store.enqueue(rollouts(*ids[start : start + 20]))
            await store.wait(ids[start : start + 20])
        stops = [Rollout(id=f"stop{n}", task="stop", group="g") for n in range(12)]
        await store.enqueue(stops)
        await store.wait([stop.id for stop in stops])
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()

    assert sorted(done) == sorted(ids)
    assert len(await store.trajectories(ids)) == 60
    assert (await store.counts())["calls"] == 180


# ------------------------------------------------------------------ exactness


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    sampled=st.lists(st.tuples(INT32, st.floats(allow_nan=False), st.integers(0, 5)), max_size=50),
    context=st.lists(INT32, max_size=20),
    message=st.dictionaries(st.text(), st.text() | st.floats(allow_nan=False) | st.none()),
)
async def test_a_call_survives_the_disk_exactly(
    store: SQLiteStore,
    sampled: list[tuple[int, float, int]],
    context: list[int],
    message: dict[str, str | float | None],
) -> None:
    counts = await store.counts()
    await store.enqueue(rollouts(f"r{counts['rollouts']}"))
    attempt = await claim(store)
    generation = Generation(
        tokens=tuple(token for token, _, _ in sampled),
        logprobs=tuple(logprob for _, logprob, _ in sampled),
        versions=tuple(version for _, _, version in sampled),
        stop="length",
        sampling=Sampling(seed=counts["rollouts"]),
        message=dict(message),
    )
    written = call(attempt.id, f"c-{attempt.id}").model_copy(
        update={
            "generations": (generation,),
            "prompt_suffix": tuple(context),
            "messages": (message,),
        }
    )
    await store.append(written)
    assert await store.calls(attempt.id) == [written]


async def test_a_lease_that_expired_in_a_transaction_that_was_redone_is_counted_once(
    tmp_path: Path,
) -> None:
    now, tries = [1000.0], list[int]()
    database = SQLiteDatabase(tmp_path / "store.db", lambda: now[0])

    def claim_at_second_try(db: Db, _: object) -> list[None]:
        tries.append(1)
        database.queue.claim(db, DEFAULT_RUN, [Claim("w", MINUTE, wait_s=0, key=None)])
        if len(tries) == 1:
            raise StoreError("not yet")
        return [None]

    async with SQLStore(database, database.queue, DEFAULT_RUN) as store:
        await store.enqueue(rollouts("a"))
        await claim(store)
        now[0] += 2 * MINUTE
        done = asyncio.get_running_loop().create_future()
        database.submit(WorkItem(claim_at_second_try, future=done))
        await done
        assert len(tries) == 2
        assert store.expired_leases == 1


async def test_a_lease_that_expired_while_its_worker_was_suspended_is_counted(
    tmp_path: Path,
) -> None:
    now = [1000.0]
    async with SQLiteStore(tmp_path / "store.db", clock=lambda: now[0]) as store:
        await store.enqueue(rollouts("a"))
        attempt = await claim(store)
        now[0] += 24 * 60 * MINUTE
        with pytest.raises(LeaseLost):
            await store.heartbeat(attempt.id, lease_s=MINUTE)
        assert store.expired_leases == 1


async def test_one_read_answers_all_who_wait_for_it(tmp_path: Path) -> None:
    database, batches = SQLiteDatabase(tmp_path / "store.db", time.time), list[list[int]]()
    first_began, may_go_on = threading.Event(), threading.Event()

    def double(db: object, keys: Sequence[int]) -> list[int | StoreError]:
        batches.append(list(keys))
        first_began.set()
        may_go_on.wait(10)
        return [StoreError("odd") if key % 2 else 2 * key for key in keys]

    read = BatchedRead[int, int](database, double)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(read(0))
        await asyncio.to_thread(first_began.wait)
        others = [tasks.create_task(read(key)) for key in (2, 4)]
        odd = tasks.create_task(read_error(read, 3))
        await asyncio.sleep(0)
        may_go_on.set()
    assert batches == [[0], [2, 4, 3]]
    assert [first.result(), *(other.result() for other in others)] == [0, 4, 8]
    assert odd.result() == "odd"
    database.close()
    with pytest.raises(StoreClosed):
        await read(1)


async def read_error(read: BatchedRead[int, int], key: int) -> str:
    with pytest.raises(StoreError) as raised:
        await read(key)
    return str(raised.value)
