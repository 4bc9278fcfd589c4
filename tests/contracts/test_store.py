"""What every store promises. A new store is done when it passes this file."""

import math
import os
import zipfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
from anyio import to_thread
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint

from clock import Clock
from postgres_server import own_schema
from whet.errors import LeaseLost, NotFound, StoreError
from whet.protocols import Store
from whet.store.client import HTTPStore
from whet.store.postgres import PostgresStore
from whet.store.server import StoreServer
from whet.store.sqlite import SQLiteStore
from whet.types import (
    RETRIED,
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
    RunSize,
    Sampling,
    SamplingOverride,
    Span,
    SpanEvent,
    Status,
    StepRecord,
    Target,
)

pytestmark = pytest.mark.anyio

MINUTE = 60.0
SOON = 0.02
"""A lease so short that its end can be waited for."""

WON = Outcome(reward=1.0)


@pytest.fixture
async def sqlite(tmp_path: Path, clock: Clock) -> AsyncGenerator[Store]:
    async with SQLiteStore(tmp_path / "store.db", clock=clock) as store:
        yield store


@pytest.fixture
async def postgres(postgres_url: str, clock: Clock) -> AsyncGenerator[Store]:
    with own_schema(postgres_url) as schema:
        async with PostgresStore(postgres_url, schema=schema, clock=clock) as store:
            yield store


@pytest.fixture
async def http(tmp_path: Path, clock: Clock) -> AsyncGenerator[Store]:
    """A client of a server on a real socket."""
    async with SQLiteStore(tmp_path / "store.db", clock=clock) as served:
        server = StoreServer(served, token="secret")
        try:
            async with HTTPStore.connect(server.url, token="secret", patience_s=5) as store:
                yield store
        finally:
            await to_thread.run_sync(server.close)


@pytest.fixture(params=["sqlite", "postgres", "http"])
def store(request: pytest.FixtureRequest) -> Store:
    return request.getfixturevalue(request.param)


def rollout(
    id_: str,
    *,
    max_attempts: int = 2,
    priority: int = 0,
    retried: tuple[FailureKind, ...] = RETRIED,
    resources: dict[str, int | Literal["latest"]] | None = None,
) -> Rollout:
    return Rollout(
        id=id_,
        task={"question": id_},
        group="g",
        max_attempts=max_attempts,
        priority=priority,
        retried=retried,
        resources=resources or {},
    )


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


def span(number: int, *, start: int = 0, name: str = "chat") -> Span:
    """With whatever an attribute may be."""
    return Span(
        trace_id="ab" * 16,
        span_id=f"{number:016x}",
        parent_id="0" * 15 + "1" if number > 1 else None,
        name=name,
        kind="client",
        start=2**63 - 1 - start,
        end=2**63 - 1,
        status="error",
        message="it broke",
        attributes={
            "gen_ai.response.id": "chatcmpl-1",
            "big": 2**63 - 1,
            "list": [1.5, True, None],
        },
        events=(SpanEvent(name="exception", time=5, attributes={"x": "\x00 é"}),),
        scope="strands.telemetry",
        resource={"service.name": "s"},
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
    for late in (Outcome(reward=0.5), failed(FailureKind.REWARD), failed()):
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
        await store.rewards(nobody)
    with pytest.raises(NotFound):
        await store.spans(nobody)
    with pytest.raises(NotFound):
        await store.record(nobody, [span(1)])
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
    await store.append(call(attempt.id))  # asked again, and recorded before
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
        await store.emit(attempt.id, Reward(value=3, target=Target(turn=2, agent="planner")))
        await store.finish(attempt.id, Outcome(reward=0.1 + 0.2))
    await store.finish(c1.id, failed(FailureKind.REWARD))

    b, a = await store.trajectories(["c", "d", "b", "nobody", "a"])

    assert (b.attempt, a.attempt) == (b1, a2)
    assert a.calls == (call(a2.id, "1"), call(a2.id, "2"))
    assert b.calls == (call(b1.id, "1"), call(b1.id, "2"))
    planned = Reward(value=3, target=Target(turn=2, agent="planner"))
    assert a.rewards == (Reward(value=0.1), Reward(value=-2, key="style"), planned)
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
    await store.record(attempt.id, [span(1)])
    assert await store.counts() == {
        "rollouts": 2,
        "attempts": 1,
        "calls": 2,
        "spans": 1,
        "generations": 4,
        "sampled_tokens": 4,
    }


async def test_rewards_are_read_while_an_attempt_runs(store: Store) -> None:
    await store.enqueue([rollout("a"), rollout("b")])
    attempt, other = await claim(store), await claim(store)
    given = [Reward(value=1, key="k", target=Target(turn=2)), Reward(value=0.5)]
    for reward in given:
        await store.emit(attempt.id, reward)
    assert (await store.rewards(attempt.id), await store.rewards(other.id)) == (given, [])


# ------------------------------------------------------------------ spans


async def test_spans_come_back_exactly_in_the_order_they_began(store: Store) -> None:
    await store.enqueue([rollout("a"), rollout("b")])
    first, second = await claim(store), await claim(store)
    late, early = span(1, start=1), span(2, start=2)
    await store.record(first.id, [late, early])
    await store.record(second.id, [])
    assert await store.spans(first.id) == [early, late]
    assert await store.spans(second.id) == []


async def test_a_span_is_recorded_once_by_its_ids(store: Store) -> None:
    await store.enqueue([rollout("a")])
    attempt = await claim(store)
    await store.record(attempt.id, [span(1), span(1, name="again")])
    await store.record(attempt.id, [span(1, name="late"), span(2)])
    assert [each.name for each in await store.spans(attempt.id)] == ["chat", "chat"]


async def test_spans_are_taken_after_the_attempt_has_ended(store: Store) -> None:
    """Frameworks export in batches, when their work is done."""
    await store.enqueue([rollout("a")])
    attempt = await claim(store)
    await store.finish(attempt.id, WON)
    await store.record(attempt.id, [span(1)])
    assert await store.spans(attempt.id) == [span(1)]


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


async def test_only_the_next_step_can_be_committed(store: Store) -> None:
    await ended(store, "a", "b")
    await store.commit(step(0, "a", "b"))
    other = step(0, "a", "b").model_copy(update={"metrics": {"loss": 7.0}})
    for wrong in (step(0), step(0, "b", "a"), other, step(2)):
        with pytest.raises(StoreError, match="the next one is 1"):
            await store.commit(wrong)
    assert await store.steps() == [step(0, "a", "b")]


async def test_the_last_step_may_be_committed_again(store: Store) -> None:
    await ended(store, "a")
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
    await ended(store, "a", "b")
    await store.enqueue([rollout("running")])
    await claim(store)
    await store.commit(step(0, "a"))
    with pytest.raises(StoreError):
        await store.commit(step(1, *consumed))
    await store.commit(step(1, "b"))
    assert await store.steps() == [step(0, "a"), step(1, "b")]


# ------------------------------------------------------------------ runs


async def test_runs_do_not_see_each_other(store: Store) -> None:
    other = store.for_run("other")
    await store.enqueue([rollout("a"), rollout("mine")])
    await other.enqueue([rollout("a"), rollout("b")])
    await store.publish("prompt", "mine")
    mine, theirs = await claim(store), await claim(other, "v")
    assert mine.id == theirs.id == "a.1"
    await store.append(call(mine.id, "x"))
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


async def test_a_run_nobody_wrote_to_is_empty(store: Store) -> None:
    nowhere = store.for_run("nowhere")
    assert await nowhere.steps() == []
    assert await nowhere.rollouts() == []
    assert await nowhere.workers() == []
    assert set((await nowhere.counts()).values()) == {0}
    assert await nowhere.size() == {}


@pytest.mark.parametrize("name", ["", "../etc", "a b", "-a", "x" * 129])
async def test_a_run_has_a_careful_name(store: Store, name: str) -> None:
    with pytest.raises(StoreError, match="is no name"):
        store.for_run(name)


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


async def test_a_cancelled_rollout_ends_as_failed_and_stays_so(store: Store) -> None:
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
    why = "cancelled: cancelled by whoever ordered it"
    assert await store.failures(["a", "b", "c"]) == {"a": why, "c": why}
    assert [t.attempt for t in await store.trajectories(["a", "b", "c"])] == [b]


async def test_cancelling_what_is_unknown_cancels_nothing(store: Store) -> None:
    await store.enqueue([rollout("a")])
    with pytest.raises(NotFound, match="'nobody'"):
        await store.cancel(["a", "nobody"])
    assert (await claim(store)).id == "a.1"


async def test_cancelling_ends_every_wait(store: Store) -> None:
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


# ------------------------------------------------------------------ what is there


async def test_rollouts_are_listed_by_page_and_filter(store: Store) -> None:
    modes = {True: Mode.TRAIN, False: Mode.VAL}
    await store.enqueue(
        [Rollout(id=f"r{n}", task=n, group=f"g{n // 4}", mode=modes[n % 2 == 0]) for n in range(12)]
    )
    for _ in range(3):
        await store.finish((await claim(store)).id, WON)
    await store.finish((await claim(store)).id, failed(FailureKind.REWARD))
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
    assert records["r3"].failure == Failure(kind=FailureKind.REWARD, message="it broke")
    assert (records["r4"].status, records["r4"].reward) == (Status.RUNNING, None)
    assert (records["r5"].status, records["r5"].attempts) == (Status.QUEUED, 0)


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


async def test_steps_are_read_by_page(store: Store) -> None:
    await ended(store, "a", "b", "c")
    records = [step(0, "c", "a"), step(1), step(2, "b")]
    for record in records:
        await store.commit(record)
    assert await store.steps(limit=2) == records[:2]
    assert await store.steps(after=1) == records[2:]
    assert await store.steps(after=0, limit=1) == records[1:2]


# ------------------------------------------------------------------ resources


async def test_resources_have_versions_that_never_change(store: Store, clock: Clock) -> None:
    template = {"text": "solve {task} \x00 \ud83d", "shots": [1, 2.5, None]}
    assert await store.publish("prompt", template) == 1
    clock.now += 1
    assert await store.publish("prompt", "shorter") == 2
    assert await store.publish("llm", None) == 1
    assert (await store.get("prompt", 1)).value == template
    assert await store.latest("prompt") == await store.get("prompt", 2)
    assert (await store.latest("prompt")).created == clock.now
    assert [(r.name, r.version) for r in await store.resources()] == [("llm", 1), ("prompt", 2)]
    for wrong in (0, 3):
        with pytest.raises(NotFound, match=f"no version {wrong} of resource 'prompt'"):
            await store.get("prompt", wrong)
    with pytest.raises(NotFound, match="no resource 'nothing'"):
        await store.latest("nothing")
    with pytest.raises(StoreError, match="is no name"):
        await store.publish("../etc", 1)


async def test_published_at_once_versions_are_all_there(store: Store) -> None:
    versions: list[int] = []

    async def publish(n: int) -> None:
        versions.append(await store.publish("prompt", n))

    async with anyio.create_task_group() as group:
        for n in range(10):
            group.start_soon(publish, n)
    assert sorted(versions) == list(range(1, 11))


async def test_an_attempt_gets_the_version_its_rollout_is_pinned_to_or_the_latest_at_its_claim(
    store: Store,
) -> None:
    await store.publish("prompt", "one")
    await store.publish("llm", "small")
    pinned = rollout("a", resources={"prompt": 1, "llm": "latest"})
    await store.enqueue([pinned])
    await store.publish("prompt", "two")
    await store.publish("llm", "large")
    first = await claim(store)
    await store.publish("llm", "larger")
    assert first.resources == {"prompt": 1, "llm": 2}
    assert await store.attempt(first.id) == first
    await store.finish(first.id, failed())
    second = await claim(store)
    assert second.resources == {"prompt": 1, "llm": 3}
    await store.finish(second.id, WON)
    assert [t.attempt for t in await store.trajectories(["a"])] == [second]
    assert [a.resources for a in await store.attempts("a")] == [first.resources, second.resources]


@pytest.mark.parametrize("resources", [{"prompt": 2}, {"nothing": 1}, {"nothing": "latest"}])
async def test_a_rollout_that_asks_for_what_was_never_published_is_refused(
    store: Store, resources: dict[str, int | Literal["latest"]]
) -> None:
    await store.publish("prompt", "one")
    with pytest.raises(NotFound, match="'b' cannot be enqueued"):
        await store.enqueue([rollout("a"), rollout("b", resources=resources)])
    assert await store.rollouts() == []


# ------------------------------------------------------------------ retention


async def test_the_size_of_every_run_is_known(store: Store) -> None:
    await store.enqueue([rollout("a"), rollout("b")])
    attempt = await claim(store)
    await store.append(call(attempt.id, "1"))
    await store.for_run("other").publish("x", 1)
    sizes = await store.size()
    mine = sizes[store.run]
    assert (mine.rollouts, mine.attempts, mine.calls) == (2, 1, 1)
    assert mine.bytes > 500
    assert sizes["other"] == RunSize(rollouts=0, attempts=0, calls=0, spans=0, bytes=0)
    await store.record(attempt.id, [span(1)])
    larger = (await store.size())[store.run]
    assert (larger.spans, larger.bytes > mine.bytes + 400) == (1, True)


async def test_pruning_forgets_calls_but_not_how_rollouts_ended(store: Store, clock: Clock) -> None:
    val = Rollout(id="val", task=1, group="g", mode=Mode.VAL)
    await store.enqueue([rollout("used"), rollout("unused"), val, rollout("bad", max_attempts=1)])
    used, unused, val_attempt, bad = [await claim(store) for _ in range(4)]
    for attempt in (used, unused, val_attempt, bad):
        await store.append(call(attempt.id))
        await store.record(attempt.id, [span(1)])
        await store.emit(attempt.id, Reward(value=1))
    for attempt in (used, unused, val_attempt):
        await store.finish(attempt.id, WON)
    await store.finish(bad.id, failed())
    await store.commit(step(0, "used"))

    assert await store.prune(clock.now) == 0
    clock.now += 10
    await ended(store, "young")
    assert await store.prune(clock.now) == 3
    assert await store.prune(clock.now) == 0
    await store.vacuum()

    kept = [t.attempt.rollout.id for t in await store.trajectories(["used", "unused", "val"])]
    assert kept == ["unused"]
    assert await store.calls(unused.id) == [call(unused.id)]
    assert await store.calls(used.id) == []
    assert (await store.spans(unused.id), await store.spans(used.id)) == ([span(1)], [])
    assert (await store.counts())["calls"] == 1
    assert set(await store.failures(["bad"])) == {"bad"}
    await store.enqueue([rollout("used"), val, rollout("bad")])
    assert await nothing_to_claim(store)
    with pytest.raises(StoreError):
        await store.commit(step(1, "used"))


async def test_a_dropped_run_leaves_no_trace_and_its_neighbour_whole(store: Store) -> None:
    other = store.for_run("other")
    for run in (store, other):
        await run.publish("prompt", 1)
        await run.enqueue([rollout("a"), rollout("b")])
        attempt = await claim(run)
        await run.append(call(attempt.id))
        await run.record(attempt.id, [span(1)])
        await run.emit(attempt.id, Reward(value=1))
        await run.finish(attempt.id, WON)
        with pytest.raises(LeaseLost):
            await run.finish(attempt.id, failed())
        await run.commit(step(0, "a"))
    before = await other.trajectories(["a"])
    running = await claim(store)
    with pytest.raises(StoreError, match="has running attempts"):
        await store.drop()
    await store.finish(running.id, WON)
    await store.drop()
    await store.vacuum()
    assert list(await store.size()) == ["other"]
    assert await store.rollouts() == []
    assert await other.trajectories(["a"]) == before
    await store.enqueue([rollout("a")])
    assert (await claim(store)).id == "a.1"


async def fill(store: Store, clock: Clock) -> None:
    await store.publish("prompt", {"text": "\ud83d \x00"})
    await store.enqueue([rollout(id_, resources={"prompt": "latest"}) for id_ in "abcdef"])
    for n in range(5):
        clock.now += 0.1
        attempt = await claim(store, f"w{n % 2}")
        await store.append(call(attempt.id, "1"))
        await store.append(call(attempt.id, "2"))
        await store.emit(attempt.id, Reward(value=n / 3, key="k"))
        await store.record(attempt.id, [span(2), span(1, start=1)])
        if n < 4:
            await store.finish(attempt.id, failed() if n == 1 else Outcome(reward=n / 7))
        if n == 2:
            with pytest.raises(LeaseLost):
                await store.finish(attempt.id, WON)
    await store.cancel(["f"])
    await store.commit(step(0, "a"))


async def everything(store: Store) -> list[object]:
    records = await store.rollouts()
    ids = [record.rollout.id for record in records]
    attempts = [await store.attempts(id_) for id_ in ids]
    return [
        records,
        attempts,
        [await store.calls(attempt.id) for row in attempts for attempt in row],
        [await store.spans(attempt.id) for row in attempts for attempt in row],
        await store.trajectories(ids),
        await store.steps(),
        await store.resources(),
        await store.workers(),
        await store.counts(),
    ]


async def test_a_run_is_exported_and_loaded_exactly(
    store: Store, clock: Clock, tmp_path: Path
) -> None:
    await fill(store, clock)
    file, again = tmp_path / "run.zip", tmp_path / "again.zip"
    await store.export(file)
    copy = store.for_run("copy")
    await copy.load(file)

    assert await everything(copy) == await everything(store)
    await copy.export(again)
    assert again.read_bytes() == file.read_bytes()
    assert not any("part" in name for name in os.listdir(tmp_path))
    clock.now += 61
    assert (await claim(copy)).id == (await claim(store)).id


async def test_an_export_from_before_there_were_spans_is_loaded(
    store: Store, clock: Clock, tmp_path: Path
) -> None:
    await store.enqueue([rollout("a")])
    await store.export(tmp_path / "run.zip")
    with (
        zipfile.ZipFile(tmp_path / "run.zip") as new,
        zipfile.ZipFile(tmp_path / "old.zip", "w") as old,
    ):
        for name in new.namelist():
            if name != "span.jsonl":
                old.writestr(name, "whet-run-2" if name == "format" else new.read(name))
    copy = store.for_run("copy")
    await copy.load(tmp_path / "old.zip")
    assert await everything(copy) == await everything(store)


async def test_what_is_no_export_is_not_loaded(store: Store, clock: Clock, tmp_path: Path) -> None:
    await fill(store, clock)
    file = tmp_path / "run.zip"
    await store.export(file)
    with pytest.raises(StoreError, match="is not empty"):
        await store.load(file)
    (tmp_path / "bad.zip").write_bytes(file.read_bytes()[:-40])
    with zipfile.ZipFile(file) as whole, zipfile.ZipFile(tmp_path / "cut.zip", "w") as cut:
        for name in whole.namelist():
            if name != "worker.jsonl":
                cut.writestr(name, whole.read(name))
    with zipfile.ZipFile(tmp_path / "new.zip", "w") as newer:
        newer.writestr("format", "whet-run-99")
    for name in ("bad.zip", "cut.zip", "new.zip", "nowhere.zip"):
        with pytest.raises(StoreError, match=name):
            await store.for_run("copy").load(tmp_path / name)
    assert list(await store.size()) == [store.run]


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
