"""Listings and counts: what every store promises."""

from typing import Any

import pytest

from support.clock import Clock
from support.store.records import MINUTE, WON, claim, failed, full_call, rollout, span
from whet.errors import LeaseLost, StoreError
from whet.protocols import Store
from whet.types import (
    Failure,
    FailureKind,
    Mode,
    Outcome,
    Rollout,
    Status,
)

pytestmark = pytest.mark.anyio


async def test_rollouts_are_listed_by_page_and_filter(store: Store) -> None:
    modes = {True: Mode.TRAIN, False: Mode.VAL}
    await store.enqueue(
        [Rollout(id=f"r{n}", task=n, group=f"g{n // 4}", mode=modes[n % 2 == 0]) for n in range(12)]
    )
    for _ in range(3):
        await store.finish((await claim(store)).id, WON)
    await store.finish((await claim(store)).id, failed(FailureKind.BAD_REWARD))
    await claim(store)

    async def ids(**filters: Any) -> list[str]:
        return [record.rollout.id for record in await store.rollouts(**filters)]

    assert await ids() == [f"r{n}" for n in range(12)]
    assert await ids(limit=2) == ["r0", "r1"]
    assert await ids(after="r9") == ["r10", "r11"]
    assert await ids(group="g1") == ["r4", "r5", "r6", "r7"]
    assert await ids(mode=Mode.VAL, after="r4", limit=2) == ["r5", "r7"]
    assert await ids(status=Status.SUCCEEDED) == ["r0", "r1", "r2"]
    assert await ids(status=Status.QUEUED, mode=Mode.TRAIN, group="g2") == ["r8", "r10"]
    assert await ids(after="r11") == []
    records = {record.rollout.id: record for record in await store.rollouts()}
    assert (records["r0"].reward, records["r0"].failure, records["r0"].attempts) == (1.0, None, 1)
    assert records["r3"].failure == Failure(kind=FailureKind.BAD_REWARD, message="it broke")
    assert (records["r4"].status, records["r4"].reward) == (Status.RUNNING, None)
    assert (records["r5"].status, records["r5"].attempts) == (Status.QUEUED, 0)


async def test_a_filter_that_is_not_unicode_is_an_error_of_the_store(store: Store) -> None:
    with pytest.raises(StoreError, match="surrogates not allowed"):
        await store.rollouts(group="\udcff")
    with pytest.raises(StoreError, match="surrogates not allowed"):
        await store.attempts("\udcff")


async def test_attempts_are_listed_with_what_came_too_late(store: Store, clock: Clock) -> None:
    await store.enqueue([rollout("a"), rollout("b")])
    first = await claim(store, "w1")
    clock.now += 61
    second = await claim(store, "w2")
    for late in (WON, failed()):
        with pytest.raises(LeaseLost):
            await store.finish(first.id, late)
    clock.now += 1
    await store.finish(second.id, Outcome(reward=0.5))

    lost, won = await store.attempts("a")

    assert (lost.id, lost.number, lost.worker, lost.status) == ("a.1", 1, "w1", Status.FAILED)
    assert lost.failure is not None
    assert lost.failure.kind is FailureKind.WORKER_LOST
    assert lost.late == (WON, failed())
    assert (won.reward, won.failure, won.late) == (0.5, None, ())
    assert won.ended == won.started + 1 == clock.now
    assert await store.attempts("b") == []


async def test_workers_are_listed_with_what_they_run_and_when_they_are_due(
    store: Store, clock: Clock
) -> None:
    assert await store.workers() == []
    await store.enqueue([rollout("a"), rollout("b")])
    await claim(store, "busy")
    attempt = await claim(store, "busy")
    start = clock.now
    clock.now += 5
    assert await store.claim("idle", lease_s=MINUTE, wait_s=0.01) is None
    clock.now += 5
    await store.heartbeat(attempt.id, lease_s=MINUTE)
    busy, idle = await store.workers()
    assert (busy.name, busy.started, busy.seen) == ("busy", start, clock.now)
    assert (busy.running, busy.due) == (("a.1", "b.1"), clock.now + MINUTE)
    assert (idle.name, idle.running) == ("idle", ())
    assert idle.due >= idle.seen + MINUTE


async def test_everything_is_counted(store: Store) -> None:
    assert set((await store.counts()).values()) == {0}
    await store.enqueue([rollout("a"), rollout("b")])
    attempt = await claim(store)
    await store.append(full_call(attempt.id, "1"))
    await store.append(full_call(attempt.id, "2"))
    await store.record(attempt.id, [span(1)])
    assert await store.counts() == {
        "rollouts": 2,
        "attempts": 1,
        "calls": 2,
        "spans": 1,
        "generations": 4,
        "sampled_tokens": 4,
    }
