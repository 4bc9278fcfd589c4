"""Training steps: what every store promises."""

import math

import pytest

from support.store.records import (
    ADVANTAGES,
    claim,
    finish_all,
    rollout,
    step,
)
from whet.errors import LeaseLost, StoreError
from whet.protocols import Store
from whet.types import TRAINER

pytestmark = pytest.mark.anyio


async def test_steps_come_back_oldest_first(store: Store) -> None:
    await finish_all(store, "a", "b", "c")
    records = [step(0, "c", "a"), step(1), step(2, "b")]
    for record in records:
        await store.commit(record)
    assert await store.steps() == records


async def test_advantages_are_kept_with_their_step(store: Store) -> None:
    await store.commit(step(0), advantages=ADVANTAGES)
    await store.commit(step(1))
    for _ in range(2):
        await store.commit(step(1), advantages=ADVANTAGES)  # which changes nothing
    assert await store.advantages(0) == ADVANTAGES
    assert await store.advantages(1) == await store.advantages(2) == {}
    assert await store.steps() == [step(0), step(1)]


async def test_only_the_next_step_can_be_committed(store: Store) -> None:
    await finish_all(store, "a", "b")
    await store.commit(step(0, "a", "b"))
    other = step(0, "a", "b").model_copy(update={"metrics": {"loss": 7.0}})
    for wrong in (step(0), step(0, "b", "a"), other, step(2)):
        with pytest.raises(StoreError, match="the next one is 1"):
            await store.commit(wrong)
    assert await store.steps() == [step(0, "a", "b")]


async def test_the_last_step_may_be_committed_again(store: Store) -> None:
    await finish_all(store, "a")
    last = step(1, "a").model_copy(update={"metrics": {"loss": 0.1, "kl": math.nan}})
    await store.commit(step(0))
    for _ in range(2):
        await store.commit(last)
    assert [record.step for record in await store.steps()] == [0, 1]
    with pytest.raises(StoreError, match="the next one is 2"):
        await store.commit(step(0))


@pytest.mark.parametrize("consumed", [["b", "a"], ["b", "b"], ["b", "running"], ["b", "nobody"]])
async def test_a_step_that_consumed_what_it_may_not_leaves_no_trace(
    store: Store, consumed: list[str]
) -> None:
    await finish_all(store, "a", "b")
    await store.enqueue([rollout("running")])
    await claim(store)
    await store.commit(step(0, "a"))
    with pytest.raises(StoreError):
        await store.commit(step(1, *consumed))
    await store.commit(step(1, "b"))
    assert await store.steps() == [step(0, "a"), step(1, "b")]


async def test_a_trainer_that_was_replaced_writes_nothing(store: Store) -> None:
    first = await store.publish(TRAINER, "host:a")
    await store.publish("policy", 1, epoch=first)
    await store.commit(step(0), epoch=first)
    second = await store.publish(TRAINER, "host:b")
    with pytest.raises(LeaseLost, match=r"taken over the run .*host:b.* choose another --run"):
        await store.publish("policy", 2, epoch=first)
    with pytest.raises(LeaseLost, match="taken over"):
        await store.commit(step(1), epoch=first)
    await store.commit(step(0), epoch=first)  # which it did before
    await store.commit(step(1), epoch=second)
    assert await store.publish("policy", 3, epoch=second) == 2
    assert [record.step for record in await store.steps()] == [0, 1]


async def test_steps_are_read_by_page(store: Store) -> None:
    await finish_all(store, "a", "b", "c")
    records = [step(0, "c", "a"), step(1), step(2, "b")]
    for record in records:
        await store.commit(record)
    assert await store.steps(limit=2) == records[:2]
    assert await store.steps(after=1) == records[2:]
    assert await store.steps(after=0, limit=1) == records[1:2]
