"""What every store promises. A new store is done when it passes this file."""

from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Protocol

import anyio
import pytest
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint

from whet.errors import LeaseLost, NotFound, StoreError
from whet.protocols import AttemptLog, RolloutQueue, StepLog
from whet.store.sqlite import SQLiteStore
from whet.types import (
    Attempt,
    AttemptId,
    Call,
    CallId,
    Failure,
    FailureKind,
    Generation,
    GenerationId,
    Mode,
    Outcome,
    Reward,
    Rollout,
    Sampling,
    SamplingOverride,
    StepRecord,
)

pytestmark = pytest.mark.anyio

MINUTE = 60.0
SOON = 0.02
"""A lease so short that its end can be waited for."""

WON = Outcome(reward=1.0)


class Store(RolloutQueue, AttemptLog, StepLog, Protocol):
    async def release_workers(self) -> int: ...
    async def counts(self) -> dict[str, int]: ...
    async def close(self) -> None: ...


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def sqlite(folder: Path, clock: Clock) -> Store:
    return SQLiteStore(folder / "store.db", clock=clock)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=[sqlite])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, clock: Clock
) -> AsyncGenerator[Store]:
    build: Callable[[Path, Clock], Store] = request.param
    store = build(tmp_path, clock)
    yield store
    await store.close()


def rollout(id_: str, *, max_attempts: int = 2) -> Rollout:
    return Rollout(id=id_, task={"question": id_}, group="g", max_attempts=max_attempts)


def failed(kind: FailureKind = FailureKind.AGENT) -> Outcome:
    return Outcome(failure=Failure(kind=kind, message="it broke"))


def call(attempt: AttemptId, name: str = "c", *, parent: GenerationId | None = None) -> Call:
    return Call(
        id=CallId(f"{attempt}-{name}"),
        attempt=attempt,
        parent=parent,
        root="root",
        messages=({"role": "user", "content": "what now?"},),
        context=(1, 2, 3),
        prompt_length=3,
        prompt_digest="digest",
        generations=(
            Generation(
                tokens=(4, 151_935),
                logprobs=(-0.1, float("-inf")),
                versions=(6, 7),
                stop="stop",
                sampling=Sampling(temperature=0.7, stop=("\n",), stop_ids=(5,)),
                message={"role": "assistant", "content": "this", "tool_calls": [{"id": "t"}]},
            ),
            Generation(
                tokens=(),
                logprobs=(),
                versions=(),
                stop="length",
                sampling=Sampling(),
                message={"role": "assistant", "content": None},
            ),
        ),
        created=1234.5678,
    )


def step(number: int, *consumed: str) -> StepRecord:
    return StepRecord(
        step=number,
        version=number + 1,
        checkpoint=f"step-{number}",
        consumed=consumed,
        metrics={"loss": 0.1 + number},
    )


async def claim(store: Store, worker: str = "w", *, lease_s: float = MINUTE) -> Attempt:
    attempt = await store.claim(worker, lease_s=lease_s, wait_s=0)
    assert attempt is not None
    return attempt


async def nothing_to_claim(store: Store) -> bool:
    return await store.claim("w", lease_s=MINUTE, wait_s=0) is None


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


async def test_a_cancelled_claim_takes_nothing(store: Store) -> None:
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
    await store.append(call(attempt.id))
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
    assert await store.failures(["a"]) == {"a": "worker_lost: the lease of worker 'w' ran out"}


async def test_whoever_waits_learns_of_a_dead_worker_though_nobody_claims(
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
            await store.append(call(attempt.id))
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


@pytest.mark.parametrize("kind", [FailureKind.TIMEOUT, FailureKind.REWARD])
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
    for late in (WON, outcome, failed()):
        with pytest.raises(LeaseLost, match=r"'a\.1' has ended"):
            await store.finish(attempt.id, late)
    assert await nothing_to_claim(store)
    assert len(await store.trajectories(["a"])) == (outcome is WON)


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


# ------------------------------------------------------------------ the log


async def test_an_attempt_is_read_back_while_it_runs(store: Store) -> None:
    await store.enqueue([rollout("a")])
    attempt = await claim(store)
    assert await store.attempt(attempt.id) == attempt
    await store.finish(attempt.id, WON)
    with pytest.raises(LeaseLost):
        await store.attempt(attempt.id)


async def test_what_is_unknown_is_not_found(store: Store) -> None:
    nobody = AttemptId("nobody.1")
    with pytest.raises(NotFound):
        await store.attempt(nobody)
    with pytest.raises(NotFound):
        await store.calls(nobody)
    with pytest.raises(NotFound):
        await store.append(call(nobody))
    with pytest.raises(NotFound):
        await store.emit(nobody, Reward(value=1))
    with pytest.raises(NotFound):
        await store.heartbeat(nobody, lease_s=MINUTE)
    with pytest.raises(NotFound):
        await store.finish(nobody, WON)
    assert await store.trajectories(["nobody"]) == []
    assert await store.failures(["nobody"]) == {}


async def test_calls_come_back_exactly_and_in_order(store: Store) -> None:
    await store.enqueue([rollout("a")])
    attempt = await claim(store)
    first = call(attempt.id, "z")
    second = call(attempt.id, "a", parent=first.generation_id(0))
    await store.append(first)
    await store.append(second)
    assert await store.calls(attempt.id) == [first, second]
    [read, _] = await store.calls(attempt.id)
    assert Call.model_validate(read.model_dump()) == first
    assert read.model_dump() == first.model_dump()


async def test_a_call_is_recorded_once(store: Store) -> None:
    await store.enqueue([rollout("a")])
    attempt = await claim(store)
    for _ in range(3):
        await store.append(call(attempt.id))
    assert await store.calls(attempt.id) == [call(attempt.id)]


async def test_nothing_is_recorded_after_the_end(store: Store) -> None:
    await store.enqueue([rollout("a")])
    attempt = await claim(store)
    await store.append(call(attempt.id))
    await store.finish(attempt.id, WON)
    with pytest.raises(LeaseLost):
        await store.append(call(attempt.id, "late"))
    with pytest.raises(LeaseLost):
        await store.emit(attempt.id, Reward(value=1))
    assert await store.calls(attempt.id) == [call(attempt.id)]


async def test_trajectories_are_the_succeeded_attempts_in_the_order_asked(store: Store) -> None:
    await store.enqueue([rollout(id_, max_attempts=2) for id_ in "abcd"])
    a1, b1, c1, _ = [await claim(store) for _ in range(4)]
    await store.append(call(a1.id, "lost"))
    await store.emit(a1.id, Reward(value=9))
    await store.finish(a1.id, failed())
    a2 = await claim(store)
    for attempt in (a2, b1):
        await store.append(call(attempt.id, "1"))
        await store.append(call(attempt.id, "2"))
        await store.emit(attempt.id, Reward(value=0.1))
        await store.emit(attempt.id, Reward(value=-2, key="style"))
        await store.finish(attempt.id, Outcome(reward=0.1 + 0.2))
    await store.finish(c1.id, failed(FailureKind.REWARD))

    b, a = await store.trajectories(["c", "d", "b", "nobody", "a"])

    assert (b.attempt, a.attempt) == (b1, a2)
    assert a.calls == (call(a2.id, "1"), call(a2.id, "2"))
    assert b.calls == (call(b1.id, "1"), call(b1.id, "2"))
    assert a.rewards == (Reward(value=0.1), Reward(value=-2, key="style"))
    assert a.reward == 0.1 + 0.2


async def test_a_trajectory_without_calls_or_rewards_is_one_too(store: Store) -> None:
    await store.enqueue([rollout("a")])
    await store.finish((await claim(store)).id, WON)
    [trajectory] = await store.trajectories(["a"])
    assert (trajectory.calls, trajectory.rewards, trajectory.reward) == ((), (), 1.0)


async def test_everything_is_counted(store: Store) -> None:
    assert set((await store.counts()).values()) == {0}
    await store.enqueue([rollout("a"), rollout("b")])
    attempt = await claim(store)
    await store.append(call(attempt.id, "1"))
    await store.append(call(attempt.id, "2"))
    assert await store.counts() == {
        "rollouts": 2,
        "attempts": 1,
        "calls": 2,
        "generations": 4,
        "sampled_tokens": 4,
    }


# ------------------------------------------------------------------ steps


async def ended(store: Store, *ids: str) -> None:
    await store.enqueue([rollout(id_) for id_ in ids])
    for _ in ids:
        await store.finish((await claim(store)).id, WON)


async def test_steps_come_back_oldest_first(store: Store) -> None:
    await ended(store, "a", "b", "c")
    records = [step(0, "c", "a"), step(1), step(2, "b")]
    for record in records:
        await store.commit(record)
    assert await store.steps() == records


@pytest.mark.parametrize("wrong", [0, 2])
async def test_only_the_next_step_can_be_committed(store: Store, wrong: int) -> None:
    await store.commit(step(0))
    with pytest.raises(StoreError, match="the next one is 1"):
        await store.commit(step(wrong))
    assert await store.steps() == [step(0)]


@pytest.mark.parametrize("consumed", [["b", "a"], ["b", "b"], ["b", "running"], ["b", "nobody"]])
async def test_a_step_that_consumed_what_it_may_not_leaves_no_trace(
    store: Store, consumed: list[str]
) -> None:
    await ended(store, "a", "b")
    await store.enqueue([rollout("running")])
    await claim(store)
    await store.commit(step(0, "a"))
    with pytest.raises(StoreError):
        await store.commit(step(1, *consumed))
    await store.commit(step(1, "b"))
    assert await store.steps() == [step(0, "a"), step(1, "b")]


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
