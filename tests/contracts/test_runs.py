"""Several runs of one store, and closing it: what every store promises."""

import anyio
import pytest

from support.store.records import MINUTE, WON, claim, full_call, rollout, span, step
from whet.errors import NotFound, StoreError
from whet.protocols import Store

pytestmark = pytest.mark.anyio


# ------------------------------------------------------------------ runs


async def test_runs_do_not_see_each_other(store: Store) -> None:
    other = store.for_run("other")
    await store.enqueue([rollout("a"), rollout("mine")])
    await other.enqueue([rollout("a"), rollout("b")])
    await store.publish("prompt", "mine")
    mine, theirs = await claim(store), await claim(other, "v")
    assert mine.id == theirs.id == "a.1"
    await store.append(full_call(mine.id, "x"))
    await store.record(mine.id, [span(1)])
    await store.finish(mine.id, WON)
    await store.commit(step(0, "a"))

    assert await other.attempt(theirs.id) == theirs
    assert await other.calls(theirs.id) == []
    assert await other.spans(theirs.id) == []
    assert await other.steps() == []
    assert await other.trajectories(["a", "mine"]) == []
    assert await other.resources() == []
    assert [w.name for w in await other.workers()] == ["v"]
    assert (await other.counts())["calls"] == 0
    assert [record.rollout.id for record in await other.rollouts()] == ["a", "b"]
    with pytest.raises(NotFound):
        await other.wait(["mine"])
    with pytest.raises(NotFound):
        await other.cancel(["mine"])
    with pytest.raises(NotFound):
        await other.rollouts(after="mine")
    with pytest.raises(NotFound):
        await other.attempts("mine")
    assert await other.release_workers() == 1
    await other.commit(step(0))


async def test_a_run_without_writes_is_empty(store: Store) -> None:
    nowhere = store.for_run("nowhere")
    assert await nowhere.steps() == []
    assert await nowhere.rollouts() == []
    assert await nowhere.workers() == []
    assert set((await nowhere.counts()).values()) == {0}
    assert await nowhere.size() == {}


@pytest.mark.parametrize("name", ["", "../etc", "a b", "-a", "x" * 129])
async def test_a_run_has_a_careful_name(store: Store, name: str) -> None:
    with pytest.raises(StoreError, match=r"^invalid name .*: expected 1 to 128 letters"):
        store.for_run(name)


# ------------------------------------------------------------------ closing


async def test_a_closed_store_refuses_and_can_be_closed_again(store: Store) -> None:
    await store.close()
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.enqueue([rollout("a")])
    with pytest.raises(StoreError, match="closed"):
        await store.steps()


async def test_closing_ends_every_wait(store: Store) -> None:
    await store.enqueue([rollout("a")])
    await claim(store)

    async def claim_in_vain() -> None:
        with pytest.raises(StoreError, match="closed"):
            await store.claim("w", lease_s=MINUTE, wait_s=MINUTE)

    async def wait_in_vain() -> None:
        with pytest.raises(StoreError, match="closed"):
            await store.wait(["a"])

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(claim_in_vain)
            group.start_soon(wait_in_vain)
            await anyio.wait_all_tasks_blocked()
            await store.close()
