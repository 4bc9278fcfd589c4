"""The rollout queue: what every store promises of claims, leases, retries and waits."""

from contextlib import suppress

import anyio
import pytest
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint

from support.clock import Clock
from support.store.records import (
    MINUTE,
    SOON,
    WON,
    claim,
    failed,
    full_call,
    nothing_to_claim,
    rollout,
)
from whet.errors import LeaseLost, NotFound
from whet.protocols import Store
from whet.types import (
    Attempt,
    AttemptId,
    FailureKind,
    Mode,
    Outcome,
    Rollout,
    SamplingOverride,
    Status,
)

pytestmark = pytest.mark.anyio


# ------------------------------------------------------------------ enqueue and claim


async def test_rollouts_are_claimed_oldest_first_and_come_back_as_they_were(store: Store) -> None:
    first = Rollout(
        id="z.1-a_B",
        task={"text": "\x00 \ud83d é", "numbers": [1, 2.5, float("inf"), None], "yes": True},
        group="g",
        mode=Mode.VAL,
        sampling=SamplingOverride(temperature=0.5),
        timeout_s=7,
        max_attempts=5,
    )
    await store.enqueue([first, rollout("b")])
    await store.enqueue([rollout("a")])

    claimed = [await claim(store) for _ in range(3)]

    assert [attempt.rollout for attempt in claimed] == [first, rollout("b"), rollout("a")]
    assert [attempt.id for attempt in claimed] == ["z.1-a_B.1", "b.1", "a.1"]
    assert [attempt.number for attempt in claimed] == [1, 1, 1]
    assert await nothing_to_claim(store)


async def test_enqueueing_an_id_again_changes_nothing(store: Store) -> None:
    await store.enqueue([rollout("a")])
    attempt = await claim(store)
    await store.enqueue([rollout("a"), rollout("a"), rollout("a", max_attempts=9)])
    assert await nothing_to_claim(store)
    await store.finish(attempt.id, WON)
    await store.enqueue([rollout("a")])
    assert await nothing_to_claim(store)


async def test_an_empty_batch_is_no_work(store: Store) -> None:
    await store.enqueue([])
    assert await nothing_to_claim(store)


async def test_a_waiting_claim_is_woken_by_new_work(store: Store) -> None:
    claimed: list[Attempt | None] = []

    async def worker(task_status: TaskStatus[None]) -> None:
        task_status.started()
        claimed.append(await store.claim("w", lease_s=MINUTE, wait_s=MINUTE))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            await group.start(worker)
            await group.start(worker)
            await store.enqueue([rollout("a"), rollout("b")])

    assert {attempt.id for attempt in claimed if attempt} == {"a.1", "b.1"}


async def test_a_waiting_claim_is_woken_by_a_retry(store: Store) -> None:
    await store.enqueue([rollout("a")])
    first = await claim(store)
    claimed: list[Attempt | None] = []

    async def worker() -> None:
        claimed.append(await store.claim("w", lease_s=MINUTE, wait_s=MINUTE))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(worker)
            await anyio.wait_all_tasks_blocked()
            await store.finish(first.id, failed())

    assert [attempt.id for attempt in claimed if attempt] == ["a.2"]


async def test_a_waiting_claim_gives_up_in_time(store: Store) -> None:
    with anyio.fail_after(5):
        assert await store.claim("w", lease_s=MINUTE, wait_s=0.01) is None


async def test_a_canceled_claim_takes_nothing(store: Store) -> None:
    await store.enqueue([rollout("a", max_attempts=1)])
    for _ in range(20):
        async with anyio.create_task_group() as group:
            group.start_soon(claim, store)
            await checkpoint()
            group.cancel_scope.cancel()
    with anyio.fail_after(5):
        attempt = await store.claim("w", lease_s=MINUTE, wait_s=MINUTE)
    assert attempt is not None
    assert attempt.id == "a.1"


# ------------------------------------------------------------------ leases


async def test_a_dead_workers_rollout_is_claimed_again_as_a_new_attempt(
    store: Store, clock: Clock
) -> None:
    await store.enqueue([rollout("a"), rollout("b")])
    first = await claim(store, "w1")
    clock.now += 61
    second = await claim(store, "w2")
    assert second.rollout == first.rollout
    assert (second.id, second.number) == ("a.2", 2)
    with pytest.raises(LeaseLost):
        await store.finish(first.id, WON)
    await store.finish(second.id, Outcome(reward=0.25))
    assert [(t.attempt, t.reward) for t in await store.trajectories(["a"])] == [(second, 0.25)]


async def test_a_heartbeat_keeps_the_lease(store: Store, clock: Clock) -> None:
    await store.enqueue([rollout("a")])
    attempt = await claim(store)
    clock.now += 59
    await store.heartbeat(attempt.id, lease_s=MINUTE)
    clock.now += 59
    assert await nothing_to_claim(store)
    clock.now += 2
    assert (await claim(store)).number == 2
    with pytest.raises(LeaseLost):
        await store.heartbeat(attempt.id, lease_s=MINUTE)


async def test_a_slow_worker_may_finish_until_its_rollout_is_claimed_again(
    store: Store, clock: Clock
) -> None:
    await store.enqueue([rollout("a")])
    attempt = await claim(store)
    clock.now += 61
    await store.enqueue([rollout("b")])
    await store.append(full_call(attempt.id))
    await store.finish(attempt.id, WON)
    assert [t.attempt for t in await store.trajectories(["a"])] == [attempt]


async def test_a_rollout_whose_last_worker_died_fails_instead_of_being_claimed(
    store: Store, clock: Clock
) -> None:
    await store.enqueue([rollout("a", max_attempts=2)])
    for _ in range(2):
        await claim(store, "w")
        clock.now += 61
    assert await nothing_to_claim(store)
    assert await store.failures(["a"]) == {"a": "worker_lost: the lease of worker 'w' expired"}


async def test_a_wait_ends_after_a_dead_worker_without_another_claim(
    store: Store, clock: Clock
) -> None:
    await store.enqueue([rollout("a", max_attempts=1)])
    await claim(store)
    clock.now += 61
    with anyio.fail_after(5):
        await store.wait(["a"])
    assert "worker_lost" in (await store.failures(["a"]))["a"]


async def test_a_lease_that_ends_during_a_wait_ends_the_wait(store: Store, clock: Clock) -> None:
    await store.enqueue([rollout("a", max_attempts=1)])
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(store.wait, ["a"])
            await anyio.wait_all_tasks_blocked()
            await claim(store, lease_s=SOON)
            clock.now += 1
    assert "worker_lost" in (await store.failures(["a"]))["a"]


async def test_a_lease_that_ends_wakes_a_waiting_claim(store: Store, clock: Clock) -> None:
    await store.enqueue([rollout("a")])
    claimed: list[Attempt | None] = []

    async def worker() -> None:
        claimed.append(await store.claim("w2", lease_s=MINUTE, wait_s=MINUTE))

    await claim(store, lease_s=SOON)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(worker)
            await anyio.wait_all_tasks_blocked()
            clock.now += 1

    assert [attempt.id for attempt in claimed if attempt] == ["a.2"]


async def test_releasing_workers_queues_all_they_had_whatever_their_attempts(store: Store) -> None:
    await store.enqueue([rollout("a", max_attempts=1), rollout("b"), rollout("c")])
    lost = [await claim(store), await claim(store)]

    assert await store.release_workers() == 2
    assert await store.release_workers() == 0

    for attempt in lost:
        with pytest.raises(LeaseLost):
            await store.append(full_call(attempt.id))
    assert [(await claim(store)).id for _ in range(3)] == ["a.2", "b.2", "c.1"]


async def test_a_released_attempt_does_not_count_as_a_try(store: Store) -> None:
    await store.enqueue([rollout("a", max_attempts=2)])
    await claim(store)
    await store.release_workers()
    await store.finish((await claim(store)).id, failed())
    await store.finish((await claim(store)).id, failed())
    assert await nothing_to_claim(store)
    assert await store.failures(["a"]) == {"a": "agent: it broke"}


# ------------------------------------------------------------------ finish and wait


@pytest.mark.parametrize("kind", [FailureKind.AGENT, FailureKind.WORKER_LOST])
async def test_a_failure_that_may_mend_is_tried_until_the_attempts_are_used(
    store: Store, kind: FailureKind
) -> None:
    await store.enqueue([rollout("a", max_attempts=3)])
    for number in range(1, 4):
        attempt = await claim(store)
        assert attempt.number == number
        assert await store.failures(["a"]) == {}
        await store.finish(attempt.id, failed(kind))
    assert await nothing_to_claim(store)
    assert await store.failures(["a"]) == {"a": f"{kind}: it broke"}


@pytest.mark.parametrize("kind", [FailureKind.TIMEOUT, FailureKind.BAD_REWARD])
async def test_a_failure_that_cannot_mend_is_final(store: Store, kind: FailureKind) -> None:
    await store.enqueue([rollout("a", max_attempts=3)])
    await store.finish((await claim(store)).id, failed(kind))
    assert await nothing_to_claim(store)
    assert await store.failures(["a"]) == {"a": f"{kind}: it broke"}


async def test_a_retry_goes_before_younger_rollouts(store: Store) -> None:
    await store.enqueue([rollout("a"), rollout("b")])
    await store.finish((await claim(store)).id, failed())
    assert (await claim(store)).id == "a.2"


@pytest.mark.parametrize("outcome", [WON, failed(FailureKind.TIMEOUT)])
async def test_the_end_of_an_attempt_is_final(store: Store, outcome: Outcome) -> None:
    await store.enqueue([rollout("a")])
    attempt = await claim(store)
    await store.finish(attempt.id, outcome)
    for late in (Outcome(reward=0.5), failed(FailureKind.BAD_REWARD), failed()):
        with pytest.raises(LeaseLost, match=r"'a\.1' has ended"):
            await store.finish(attempt.id, late)
    assert await nothing_to_claim(store)
    assert len(await store.trajectories(["a"])) == (outcome is WON)


@pytest.mark.parametrize("outcome", [WON, failed(), failed(FailureKind.TIMEOUT)])
async def test_the_outcome_that_ended_an_attempt_may_be_reported_again(
    store: Store, outcome: Outcome
) -> None:
    await store.enqueue([rollout("a"), rollout("b")])
    attempt = await claim(store)
    await store.finish(attempt.id, outcome)
    before = await store.rollouts()
    await store.finish(attempt.id, outcome)
    assert await store.rollouts() == before
    assert [record.late for record in await store.attempts("a")] == [()]


async def test_waiting_ends_when_all_have_ended(store: Store) -> None:
    await store.enqueue([rollout("a"), rollout("b", max_attempts=1), rollout("c")])
    a, b = await claim(store), await claim(store)
    ended = anyio.Event()

    async def wait() -> None:
        await store.wait(["a", "b"])
        ended.set()

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await store.finish(a.id, WON)
            await anyio.wait_all_tasks_blocked()
            assert not ended.is_set()
            await store.finish(b.id, failed())
        await store.wait(["b", "a"])
        await store.wait([])


async def test_waiting_for_an_unknown_rollout_is_an_error(store: Store) -> None:
    with pytest.raises(NotFound, match="'nobody'"):
        await store.wait(["nobody"])


# ------------------------------------------------------------------ priorities, cancel, limits


async def test_a_higher_priority_goes_first_and_equals_in_their_order(store: Store) -> None:
    order = {"a": 0, "b": 5, "c": 0, "d": 5, "e": -1}
    await store.enqueue([rollout(id_, priority=p) for id_, p in order.items()])
    assert [(await claim(store)).rollout.id for _ in order] == ["b", "d", "a", "c", "e"]


async def test_a_dead_workers_rollout_keeps_its_place(store: Store, clock: Clock) -> None:
    await store.enqueue([rollout("low"), rollout("high", priority=1), rollout("first", priority=2)])
    await claim(store)
    clock.now += 61
    assert [(await claim(store)).id for _ in range(3)] == ["first.2", "high.1", "low.1"]


async def test_a_canceled_rollout_ends_as_failed_and_stays_so(store: Store) -> None:
    await store.enqueue([rollout(id_) for id_ in "abcd"])
    a, b = await claim(store), await claim(store)
    await store.finish(b.id, WON)

    assert await store.cancel(["a", "b", "c", "c"]) == 2
    assert await store.cancel(["a", "b", "c"]) == 0

    with pytest.raises(LeaseLost):
        await store.heartbeat(a.id, lease_s=MINUTE)
    with pytest.raises(LeaseLost):
        await store.finish(a.id, WON)
    await store.enqueue([rollout("a"), rollout("c")])
    assert (await claim(store)).id == "d.1"
    assert await nothing_to_claim(store)
    why = "canceled: canceled on request"
    assert await store.failures(["a", "b", "c"]) == {"a": why, "c": why}
    assert [t.attempt for t in await store.trajectories(["a", "b", "c"])] == [b]


async def test_canceling_what_is_unknown_cancels_nothing(store: Store) -> None:
    await store.enqueue([rollout("a")])
    with pytest.raises(NotFound, match="'nobody'"):
        await store.cancel(["a", "nobody"])
    assert (await claim(store)).id == "a.1"


async def test_canceling_ends_every_wait(store: Store) -> None:
    await store.enqueue([rollout("a"), rollout("b")])
    attempt = await claim(store)
    statuses: list[Status] = []

    async def watch() -> None:
        statuses.append(await store.ended(attempt.id))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(store.wait, ["a", "b"])
            group.start_soon(watch)
            await anyio.wait_all_tasks_blocked()
            await store.cancel(["b", "a"])
    assert statuses == [Status.FAILED]


async def test_the_end_of_an_attempt_is_heard_of_however_it_came(
    store: Store, clock: Clock
) -> None:
    await store.enqueue([rollout("a"), rollout("b"), rollout("c")])
    first, second, third = await claim(store), await claim(store), await claim(store)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            for attempt in (first, second, third):
                group.start_soon(store.ended, attempt.id)
            await anyio.wait_all_tasks_blocked()
            await store.finish(first.id, WON)
            await store.release_workers()
        assert await store.ended(first.id) is Status.SUCCEEDED
        assert await store.ended(third.id) is Status.FAILED
    with pytest.raises(NotFound):
        await store.ended(AttemptId("nobody.1"))


async def test_an_unknown_attempt_is_refused_to_its_caller_alone(store: Store) -> None:
    await store.enqueue([rollout("a"), rollout("b")])
    first, second = await claim(store), await claim(store)
    await store.finish(first.id, WON)
    await store.finish(second.id, WON)
    found: dict[AttemptId, Status] = {}

    async def watch(attempt: AttemptId) -> None:
        with suppress(NotFound):
            found[attempt] = await store.ended(attempt)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            for attempt in (first.id, AttemptId("nobody.1"), second.id):
                group.start_soon(watch, attempt)
    assert found == {first.id: Status.SUCCEEDED, second.id: Status.SUCCEEDED}


async def test_a_rollout_says_itself_which_failures_are_tried_again(
    store: Store, clock: Clock
) -> None:
    await store.enqueue(
        [
            rollout("timeout", retried=(FailureKind.TIMEOUT,)),
            rollout("never", retried=()),
            rollout("lost", retried=(FailureKind.AGENT,)),
        ]
    )
    timeout, never, _ = [await claim(store) for _ in range(3)]
    await store.finish(timeout.id, failed(FailureKind.TIMEOUT))
    await store.finish(never.id, failed(FailureKind.AGENT))
    timeout = await claim(store)
    assert timeout.id == "timeout.2"
    clock.now += 61
    assert await nothing_to_claim(store)
    assert set(await store.failures(["timeout", "never", "lost"])) == {"timeout", "never", "lost"}


async def test_a_failure_that_is_not_the_rollouts_uses_up_no_try(store: Store) -> None:
    await store.enqueue([rollout("a", max_attempts=1), rollout("never", retried=())])
    for kind in (FailureKind.WORKER_LEFT, FailureKind.MODEL_LOST):
        await store.finish((await claim(store)).id, failed(kind))
    last = await claim(store)
    assert last.id == "a.3"
    await store.finish(last.id, failed(FailureKind.AGENT))
    await store.finish((await claim(store)).id, failed(FailureKind.WORKER_LEFT))
    assert set(await store.failures(["a", "never"])) == {"a", "never"}


async def test_an_attempt_that_outlives_its_limit_by_a_lease_is_ended(
    store: Store, clock: Clock
) -> None:
    await store.enqueue([Rollout(id="a", task=1, group="g", timeout_s=100)])
    attempt = await claim(store)
    for _ in range(3):
        clock.now += 50
        await store.heartbeat(attempt.id, lease_s=MINUTE)
    clock.now += 50
    with pytest.raises(LeaseLost):
        await store.heartbeat(attempt.id, lease_s=MINUTE)
    assert await store.failures(["a"]) == {"a": "timeout: the attempt ran longer than 100 s"}


async def test_an_attempt_whose_limit_passed_while_its_worker_was_suspended_is_retried(
    store: Store, clock: Clock
) -> None:
    await store.enqueue([Rollout(id="a", task=1, group="g", timeout_s=100)])
    attempt = await claim(store)
    clock.now += 3600
    with pytest.raises(LeaseLost):
        await store.heartbeat(attempt.id, lease_s=MINUTE)
    assert (await claim(store)).id == "a.2"
    [lost, _] = await store.attempts("a")
    assert lost.failure
    assert lost.failure.kind == FailureKind.WORKER_LOST
