"""What the SQLite store promises beyond the contract: its file, its threads, its failures."""

import sqlite3
import threading
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whet.errors import LeaseLost, StoreError
from whet.store.packing import (
    pack_floats,
    pack_runs,
    unpack_floats,
    unpack_runs,
    unpack_tokens,
)
from whet.store.schema import FIRST, MIGRATIONS
from whet.store.sqlite import SQLiteStore
from whet.types import (
    Attempt,
    AttemptId,
    Call,
    CallId,
    Generation,
    Outcome,
    Reward,
    Rollout,
    Sampling,
    StepRecord,
    pack_tokens,
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


def rollouts(*ids: str) -> list[Rollout]:
    return [Rollout(id=id_, task=id_, group="g") for id_ in ids]


def call(attempt: AttemptId, name: str, tokens: tuple[int, ...] = (4, 5)) -> Call:
    return Call(
        id=CallId(name),
        attempt=attempt,
        parent=None,
        root="root",
        messages=(),
        context=(1, 2, 3),
        prompt_length=3,
        prompt_digest="digest",
        generations=(
            Generation(
                tokens=tokens,
                logprobs=(-0.5,) * len(tokens),
                versions=(1,) * len(tokens),
                stop="stop",
                sampling=Sampling(),
                message={},
            ),
        ),
        created=0.0,
    )


async def claim(store: SQLiteStore) -> Attempt:
    attempt = await store.claim("w", lease_s=MINUTE, wait_s=0)
    assert attempt is not None
    return attempt


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
    assert db.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
    assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    db.close()


FIRST_FILE = """
INSERT INTO rollout VALUES
    (1, 'won', '{"id":"won","task":1,"group":"g","mode":"val"}', 'succeeded', 2, 0, NULL),
    (2, 'bad', '{"id":"bad","task":2,"group":"g","mode":"train"}', 'failed', 1, 1, NULL),
    (3, 'busy', '{"id":"busy","task":3,"group":"h","mode":"train"}', 'running', 1, 1, 60.5),
    (4, 'new', '{"id":"new","task":4,"group":"h","mode":"train"}', 'queued', 0, 2, NULL);
INSERT INTO attempt VALUES
    (1, 'won.1', 1, 1, 'w', 'failed', NULL, '{"kind":"agent","message":"no"}', 1.5, 2.5),
    (2, 'won.2', 1, 2, 'w', 'succeeded', 0.5, NULL, 3.5, 4.5),
    (3, 'bad.1', 2, 1, 'w', 'failed', NULL, '{"kind":"reward","message":"none"}', 5.5, 6.5),
    (4, 'busy.1', 3, 1, 'w', 'running', NULL, NULL, 7.5, NULL);
INSERT INTO call VALUES
    (1, 'c', 2, NULL, 'root', '[]', x'0100000002000000', 2, 'digest', 3.75, '{}');
INSERT INTO generation VALUES
    (1, 1, 'stop', '{}', '{}', x'01000000000000000100000000000000', x'07000000',
        x'000000000000e0bf');
INSERT INTO reward VALUES (1, 2, 'k', 0.25);
INSERT INTO late_report VALUES (1, 1, '{"reward":1.0}', 9.5);
INSERT INTO step VALUES (0, 1, 'c0', '{}');
INSERT INTO consumed VALUES ('won', 0, 0);
PRAGMA user_version = 1;
"""


async def test_a_file_of_the_first_version_becomes_the_default_run(path: Path) -> None:
    db = sqlite3.connect(path)
    for statement in FIRST:
        db.execute(statement)
    db.executescript(FIRST_FILE)
    db.close()

    async with SQLiteStore(path, clock=lambda: 100.0) as store:
        won, bad, busy, new = await store.rollouts()
        assert (won.rollout.mode, won.reward, won.attempts, won.created) == ("val", 0.5, 2, 1.5)
        assert bad.failure is not None
        assert bad.failure.message == "none"
        assert (busy.status, new.status) == ("running", "queued")
        [trajectory] = await store.trajectories(["won", "bad", "busy"])
        assert trajectory.calls[0].generations[0].logprobs == (-0.5,)
        assert trajectory.rewards == (Reward(value=0.25, key="k"),)
        assert (await store.attempts("won"))[0].late == (WON,)
        assert [record.consumed for record in await store.steps()] == [("won",)]
        assert [(await claim(store)).id for _ in range(2)] == ["busy.2", "new.1"]


async def test_an_empty_file_of_the_first_version_has_no_run(path: Path) -> None:
    db = sqlite3.connect(path)
    for statement in FIRST:
        db.execute(statement)
    db.execute("PRAGMA user_version = 1")
    db.close()
    async with SQLiteStore(path) as store:
        assert await store.size() == {}


def test_a_file_of_a_newer_version_is_refused(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreError, match=r"schema version 99.*upgrade whet"):
        SQLiteStore(path)


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


async def test_a_failing_change_does_not_undo_its_neighbours(store: SQLiteStore) -> None:
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
    pages = await store._write(  # pyright: ignore[reportPrivateUsage]
        lambda db: db.execute("PRAGMA page_count").fetchone()[0]
    )

    def limit(db: sqlite3.Connection, most: int) -> None:
        db.execute(f"PRAGMA max_page_count = {most}")

    await store._write(lambda db: limit(db, pages + 2))  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(StoreError, match="full"):
        await store.append(call(attempt.id, "big", tokens=(1,) * 100_000))
    await store._write(lambda db: limit(db, 10_000))  # pyright: ignore[reportPrivateUsage]
    await store.append(call(attempt.id, "big", tokens=(1,) * 100_000))
    assert [c.id for c in await store.calls(attempt.id)] == ["big"]


async def test_a_claim_cancelled_during_its_commit_is_undone(path: Path) -> None:
    armed, inside, go_on = threading.Event(), threading.Event(), threading.Event()
    slow = True

    def clock() -> float:
        if slow:
            time.sleep(0.1)
        if armed.is_set():
            inside.set()
            go_on.wait(5)
        return 0.0

    async with SQLiteStore(path, clock=clock) as store:
        assert await store.claim("w", lease_s=MINUTE, wait_s=0) is None
        slow = False  # but all is left to the thread for a while
        await store.enqueue([Rollout(id="a", task=None, group="g", max_attempts=1)])
        armed.set()
        async with anyio.create_task_group() as group:
            group.start_soon(claim, store)
            await to_thread.run_sync(inside.wait, 5)
            group.cancel_scope.cancel()
        armed.clear()
        go_on.set()
        with anyio.fail_after(5):
            attempt = await store.claim("w", lease_s=MINUTE, wait_s=MINUTE)
        assert attempt is not None
        assert attempt.id == "a.1"
        assert (await store.counts())["attempts"] == 1


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


@given(st.lists(INT32))
def test_ints_are_unpacked_as_they_were_packed(values: list[int]) -> None:
    assert unpack_tokens(pack_tokens(values)) == tuple(values)


@given(st.lists(st.floats(allow_nan=True)))
def test_floats_are_unpacked_bit_for_bit(values: list[float]) -> None:
    packed = pack_floats(values)
    assert pack_floats(unpack_floats(packed)) == packed
    assert list(map(repr, unpack_floats(packed))) == list(map(repr, values))


@given(st.lists(st.integers(0, 3)) | st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_runs_are_unpacked_as_they_were_packed(values: list[int]) -> None:
    assert unpack_runs(pack_runs(values)) == tuple(values)


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
        update={"generations": (generation,), "context": tuple(context), "messages": (message,)}
    )
    await store.append(written)
    assert await store.calls(attempt.id) == [written]
