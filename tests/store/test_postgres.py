"""The PostgreSQL store beyond the contract: several processes, lost connections."""

import asyncio
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import anyio
import psycopg
import pytest
from anyio import to_thread

from support.servers.postgres_server import own_schema
from whet.errors import StoreError
from whet.store import DEFAULT_RUN, open_store
from whet.store.database import Db, WorkItem
from whet.store.postgres import PostgresDatabase, PostgresStore
from whet.store.queries.queue import Claim
from whet.store.schema import VERSION
from whet.store.sqlite import SQLiteStore
from whet.types import Outcome, Rollout, Status

pytestmark = pytest.mark.anyio

MINUTE = 60.0
WON = Outcome(reward=1.0)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def schema(postgres_url: str) -> Generator[str]:
    with own_schema(postgres_url) as schema:
        yield schema


@pytest.fixture
async def first(postgres_url: str, schema: str) -> AsyncGenerator[PostgresStore]:
    async with PostgresStore(postgres_url, schema=schema) as store:
        yield store


@pytest.fixture
async def second(postgres_url: str, schema: str) -> AsyncGenerator[PostgresStore]:
    """Another process, from the database's point of view."""
    async with PostgresStore(postgres_url, schema=schema) as store:
        yield store


def rollouts(*ids: str, max_attempts: int = 2) -> list[Rollout]:
    return [Rollout(id=id_, task=id_, group="g", max_attempts=max_attempts) for id_ in ids]


async def test_processes_wake_each_other(first: PostgresStore, second: PostgresStore) -> None:
    claimed = anyio.Event()
    ended: list[Status] = []

    async def work() -> None:
        attempt = await second.claim("w", lease_s=MINUTE, wait_s=MINUTE)
        assert attempt is not None
        claimed.set()
        ended.append(await second.ended(attempt.id))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(work)
            await anyio.wait_all_tasks_blocked()
            await first.enqueue(rollouts("a"))
            group.start_soon(second.wait, ["a"])
            await claimed.wait()
            await first.cancel(["a"])
    assert ended == [Status.FAILED]


async def test_a_lease_of_a_dead_process_ends_a_wait_in_another(
    postgres_url: str, schema: str
) -> None:
    clock = Clock()
    async with PostgresStore(postgres_url, schema=schema, clock=clock) as first:
        await first.enqueue(rollouts("a", max_attempts=1))
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(first.wait, ["a"])
                await anyio.wait_all_tasks_blocked()
                async with PostgresStore(postgres_url, schema=schema, clock=clock) as second:
                    assert await second.claim("w", lease_s=0.05, wait_s=0)
                    clock.now += 1
        assert "worker_lost" in (await first.failures(["a"]))["a"]


async def test_a_lease_of_a_transaction_that_was_redone_is_known_to_other_processes(
    postgres_url: str, schema: str
) -> None:
    clock, tries = Clock(), list[int]()
    database = PostgresDatabase(postgres_url, schema, clock)

    def claim(db: Db, _: object) -> list[None]:
        """Claim a rollout; the commit of the first try fails."""
        tries.append(1)
        database.queue.claim(db, DEFAULT_RUN, [Claim("w", lease_s=0.05, wait_s=0, key=None)])
        if len(tries) == 1:
            db.execute(
                "CREATE TEMP TABLE number (n INT UNIQUE DEFERRABLE INITIALLY DEFERRED)"
                " ON COMMIT DROP"
            )
            db.execute("INSERT INTO number VALUES (1), (1)")
        return [None]

    async with PostgresStore(postgres_url, schema=schema, clock=clock) as waiting:
        await waiting.enqueue(rollouts("a", max_attempts=1))
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(waiting.wait, ["a"])
                await anyio.wait_all_tasks_blocked()
                done = asyncio.get_running_loop().create_future()
                database.submit(WorkItem(claim, future=done))
                await done
                await to_thread.run_sync(database.close)
                clock.now += 1
    assert len(tries) == 2


async def test_many_workers_of_two_processes_do_each_rollout_once(
    first: PostgresStore, second: PostgresStore
) -> None:
    done: list[str] = []

    async def work(store: PostgresStore) -> None:
        while attempt := await store.claim("w", lease_s=MINUTE, wait_s=0.2):
            await store.finish(attempt.id, WON)
            done.append(attempt.rollout.id)

    ids = [f"r{n}" for n in range(60)]
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for store in (first, second) * 4:
                group.start_soon(work, store)
            await first.enqueue(rollouts(*ids[:30]))
            await second.enqueue(rollouts(*ids[30:]))
            await first.wait(ids)
    assert sorted(done) == sorted(ids)


async def test_a_lost_connection_is_an_error_and_the_next_call_has_a_new_one(
    first: PostgresStore, postgres_url: str
) -> None:
    await first.enqueue(rollouts("a"))
    await first.rollouts()
    with psycopg.connect(postgres_url, autocommit=True) as db:
        db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            " AND backend_type = 'client backend'"
        )
    with pytest.raises(StoreError):
        await first.enqueue(rollouts("lost"))
    with pytest.raises(StoreError):
        await first.rollouts()
    with anyio.fail_after(10):
        await first.enqueue(rollouts("b"))
        while True:  # each reader finds out for itself
            try:
                records = await first.rollouts()
                break
            except StoreError:
                continue
    assert [record.rollout.id for record in records] == ["a", "b"]


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
async def test_tables_of_another_version_are_refused(
    first: PostgresStore, postgres_url: str, schema: str, version: int
) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as db:
        db.execute(f"UPDATE {schema}.schema_version SET version = {version}".encode())
    expected = rf"'{schema}' has schema version {version}, expected {VERSION}: open it with .*"
    with pytest.raises(StoreError, match=expected):
        PostgresStore(postgres_url, schema=schema)


def test_a_server_that_is_not_there_is_an_error_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot open the store"):
        PostgresStore(f"postgresql://nobody@/none?host={tmp_path}")


def test_a_schema_has_a_careful_name() -> None:
    with pytest.raises(StoreError, match="invalid schema name"):
        PostgresStore("postgresql://", schema='x"; DROP TABLE rollout')


async def test_a_run_goes_from_one_database_to_the_other_and_back(
    first: PostgresStore, tmp_path: Path
) -> None:
    await first.enqueue(rollouts("a", "b"))
    attempt = await first.claim("w", lease_s=MINUTE, wait_s=0)
    assert attempt is not None
    await first.finish(attempt.id, WON)
    await first.export(tmp_path / "1.zip")
    async with open_store(tmp_path / "store.db", run="copy") as file:
        assert isinstance(file, SQLiteStore)
        await file.load(tmp_path / "1.zip")
        assert await file.trajectories(["a"]) == await first.trajectories(["a"])
        await file.export(tmp_path / "2.zip")
    back = first.for_run("back")
    await back.load(tmp_path / "2.zip")
    await back.export(tmp_path / "3.zip")
    one, two, three = ((tmp_path / f"{n}.zip").read_bytes() for n in (1, 2, 3))
    assert one == two == three


async def test_a_store_is_opened_by_its_url(postgres_url: str) -> None:
    async with open_store(postgres_url, run="by-url") as store:
        assert isinstance(store, PostgresStore)
        assert await store.rollouts() == []
