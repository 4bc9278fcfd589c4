"""A request with an idempotency key is executed once, on every database."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from anyio import to_thread

from support.clock import Clock
from support.servers.postgres_server import own_schema
from support.store.records import step
from whet.errors import LeaseLost, StoreError
from whet.store.database import Db, WorkItem
from whet.store.postgres import PostgresStore
from whet.store.queries.idempotency import KEY_TTL_S
from whet.store.sql_store import SQLStore
from whet.store.sqlite import SQLiteDatabase, SQLiteStore
from whet.types import AttemptId, Failure, FailureKind, Outcome, Reward, Rollout

pytestmark = pytest.mark.anyio

BROKEN = Outcome(failure=Failure(kind=FailureKind.AGENT, message="it broke"))


@pytest.fixture
async def sqlite(tmp_path: Path, clock: Clock) -> AsyncGenerator[SQLStore]:
    async with SQLiteStore(tmp_path / "store.db", clock=clock) as store:
        yield store


@pytest.fixture
async def postgres(postgres_url: str, clock: Clock) -> AsyncGenerator[SQLStore]:
    with own_schema(postgres_url) as schema:
        async with PostgresStore(postgres_url, schema=schema, clock=clock) as store:
            yield store


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest) -> SQLStore:
    return request.getfixturevalue(request.param)


async def claim(store: SQLStore, key: str) -> AttemptId | None:
    attempt = await store.idempotent(key).claim("w", lease_s=60, wait_s=0)
    return attempt and attempt.id


async def enqueue(store: SQLStore, *ids: str, max_attempts: int = 2) -> None:
    await store.enqueue(
        [Rollout(id=id_, task=1, group="g", max_attempts=max_attempts) for id_ in ids]
    )


async def test_a_claim_with_the_same_key_gets_the_same_attempt(
    store: SQLStore, clock: Clock
) -> None:
    await store.publish("prompt", 1)
    await store.enqueue(
        [Rollout(id=id_, task=id_, group="g", resources={"prompt": "latest"}) for id_ in "ab"]
    )
    first = await store.idempotent("t1").claim("w", lease_s=60, wait_s=0)
    clock.now += 59
    assert await store.idempotent("t1").claim("w", lease_s=60, wait_s=0) == first
    clock.now += 59  # asking again kept the lease
    assert await claim(store, "t2") == "b.1"
    assert await claim(store, "t3") is None
    clock.now += 2
    assert await claim(store, "t3") == "a.2"
    with pytest.raises(LeaseLost):
        await claim(store, "t1")


async def test_a_key_that_found_nothing_may_find_something_later(store: SQLStore) -> None:
    assert await claim(store, "t") is None
    await enqueue(store, "a")
    assert await claim(store, "t") == "a.1"


async def test_a_key_is_of_its_run(store: SQLStore) -> None:
    other = store.for_run("other")
    for run in (store, other):
        await enqueue(run, "a")
    assert await claim(store, "t") == "a.1"
    await other.give_back("t")
    with pytest.raises(LeaseLost):
        await claim(other, "t")
    assert await claim(store, "t") == "a.1"


async def test_a_claim_that_is_giving_back_counts_as_never_made(store: SQLStore) -> None:
    await enqueue(store, "a", max_attempts=1)
    assert await claim(store, "t1") == "a.1"
    for _ in range(2):
        await store.give_back("t1")
        with pytest.raises(LeaseLost, match="given back"):
            await claim(store, "t1")
    assert await claim(store, "t2") == "a.1"


async def test_a_key_giving_back_before_it_came_claims_nothing(store: SQLStore) -> None:
    await enqueue(store, "a")
    await store.give_back("t")
    with pytest.raises(LeaseLost, match="given back"):
        await claim(store, "t")
    assert [record.attempts for record in await store.rollouts()] == [0]


class Hold:
    """A change that keeps the writer busy until it is released."""

    def __init__(self) -> None:
        self.began, self.released = threading.Event(), threading.Event()

    def __call__(self, db: Db, _: object) -> list[None]:
        self.began.set()
        self.released.wait()
        return [None]


async def test_a_claim_that_is_giving_back_and_canceled_leaves_the_next_one_alone(
    tmp_path: Path, clock: Clock
) -> None:
    database = SQLiteDatabase(tmp_path / "store.db", clock)
    async with SQLStore(database, database.queue, "default") as store:
        await enqueue(store, "a")
        before, commit = Hold(), Hold()
        database.submit(WorkItem(before))
        await to_thread.run_sync(before.began.wait)
        first = asyncio.create_task(claim(store, "t1"))
        giving_back = asyncio.create_task(store.give_back("t1"))
        await asyncio.sleep(0)
        first.cancel()
        database.submit(WorkItem(commit))
        before.released.set()
        await to_thread.run_sync(commit.began.wait)
        second = asyncio.create_task(claim(store, "t2"))
        await asyncio.sleep(0)
        commit.released.set()
        await asyncio.wait([first, giving_back])
        assert await second == "a.1", "the same id again"
        await store.enqueue([])  # after what the canceled claim undoes
        assert (await store.attempt(AttemptId("a.1"))).number == 1


async def test_an_attempt_that_has_begun_is_not_giving_back(store: SQLStore) -> None:
    await enqueue(store, "a")
    assert await claim(store, "t") == "a.1"
    await store.emit(AttemptId("a.1"), Reward(value=1))
    with pytest.raises(StoreError, match="has begun"):
        await store.give_back("t")
    assert await claim(store, "t") == "a.1"


async def test_a_reward_is_emitted_once_even_if_the_attempt_has_ended(store: SQLStore) -> None:
    await enqueue(store, "a")
    assert await claim(store, "t") == "a.1"
    attempt = AttemptId("a.1")
    for _ in range(3):
        await store.idempotent("e1").emit(attempt, Reward(value=1))
    await store.idempotent("e2").emit(attempt, Reward(value=1))
    await store.finish(attempt, Outcome(reward=1.0))
    await store.idempotent("e1").emit(attempt, Reward(value=1))
    with pytest.raises(LeaseLost):
        await store.idempotent("e3").emit(attempt, Reward(value=1))
    [trajectory] = await store.trajectories(["a"])
    assert trajectory.rewards == (Reward(value=1), Reward(value=1))


async def test_a_change_that_was_refused_may_be_sent_again(store: SQLStore) -> None:
    with pytest.raises(StoreError):
        await store.idempotent("t").cancel(["a"])
    await enqueue(store, "a")
    assert [await store.idempotent("t").cancel(["a"]) for _ in range(2)] == [1, 1]


async def test_answers_are_the_same_again(store: SQLStore, clock: Clock) -> None:
    assert [await store.idempotent("p").publish("prompt", "x") for _ in range(2)] == [1, 1]
    assert await store.publish("prompt", "y") == 2
    await enqueue(store, "a", "b", max_attempts=1)
    assert await claim(store, "t1") == "a.1"
    assert await store.idempotent("r").release_workers() == 1
    assert await claim(store, "t2") == "a.2"
    assert await store.idempotent("r").release_workers() == 1
    await store.finish(AttemptId("a.2"), BROKEN)
    await store.commit(step(0, "a"))
    clock.now += 1
    assert [await store.idempotent("f").prune(clock.now) for _ in range(2)] == [1, 1]


async def test_a_run_that_came_again_is_not_dropped_by_an_old_key(store: SQLStore) -> None:
    await enqueue(store, "a")
    await store.idempotent("t").drop()
    assert await store.rollouts() == []
    await enqueue(store, "a")
    await store.idempotent("t").drop()
    assert len(await store.rollouts()) == 1


async def test_a_run_is_loaded_once(store: SQLStore, tmp_path: Path) -> None:
    await enqueue(store, "a")
    await store.export(tmp_path / "run.zip")
    copy = store.for_run("copy")
    for _ in range(2):
        await copy.idempotent("t").load(tmp_path / "run.zip")
    assert len(await copy.rollouts()) == 1


async def test_old_keys_are_forgotten(store: SQLStore, clock: Clock) -> None:
    assert await store.idempotent("t").publish("prompt", 1) == 1
    clock.now += KEY_TTL_S + 1
    assert await store.idempotent("other").publish("prompt", 2) == 2
    assert await store.idempotent("t").publish("prompt", 3) == 3
