"""Calls, rewards, spans and trajectories: what every store promises."""

import pytest

from support.store.records import MINUTE, WON, claim, failed, full_call, rollout, span
from whet.errors import LeaseLost, NotFound
from whet.protocols import Store
from whet.types import (
    AttemptId,
    Call,
    Failure,
    FailureKind,
    Outcome,
    Reward,
    Target,
)

pytestmark = pytest.mark.anyio


# ------------------------------------------------------------------ calls and rewards


async def test_an_attempt_is_read_back_while_it_runs(store: Store) -> None:
    await store.enqueue([rollout("a")])
    attempt = await claim(store)
    assert await store.attempt(attempt.id) == attempt
    await store.finish(attempt.id, WON)
    with pytest.raises(LeaseLost):
        await store.attempt(attempt.id)


async def test_what_is_unknown_is_not_found(store: Store) -> None:
    unknown = AttemptId("nobody.1")
    with pytest.raises(NotFound):
        await store.attempt(unknown)
    with pytest.raises(NotFound):
        await store.calls(unknown)
    with pytest.raises(NotFound):
        await store.append(full_call(unknown))
    with pytest.raises(NotFound):
        await store.emit(unknown, Reward(value=1))
    with pytest.raises(NotFound):
        await store.rewards(unknown)
    with pytest.raises(NotFound):
        await store.spans(unknown)
    with pytest.raises(NotFound):
        await store.record(unknown, [span(1)])
    with pytest.raises(NotFound):
        await store.heartbeat(unknown, lease_s=MINUTE)
    with pytest.raises(NotFound):
        await store.finish(unknown, WON)
    assert await store.trajectories(["nobody"]) == []
    assert await store.failures(["nobody"]) == {}


async def test_calls_come_back_exactly_and_in_order(store: Store) -> None:
    await store.enqueue([rollout("a")])
    attempt = await claim(store)
    first = full_call(attempt.id, "z")
    second = full_call(attempt.id, "a", parent=first.generation_id(0))
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
        await store.append(full_call(attempt.id))
    assert await store.calls(attempt.id) == [full_call(attempt.id)]


async def test_nothing_is_recorded_after_the_end(store: Store) -> None:
    await store.enqueue([rollout("a")])
    attempt = await claim(store)
    await store.append(full_call(attempt.id))
    await store.finish(attempt.id, WON)
    await store.append(full_call(attempt.id))  # sent again, and recorded before
    with pytest.raises(LeaseLost):
        await store.append(full_call(attempt.id, "late"))
    with pytest.raises(LeaseLost):
        await store.emit(attempt.id, Reward(value=1))
    assert await store.calls(attempt.id) == [full_call(attempt.id)]


async def test_trajectories_are_the_succeeded_attempts_in_argument_order(
    store: Store,
) -> None:
    await store.enqueue([rollout(id_, max_attempts=2) for id_ in "abcd"])
    a1, b1, c1, _ = [await claim(store) for _ in range(4)]
    await store.append(full_call(a1.id, "lost"))
    await store.emit(a1.id, Reward(value=9))
    await store.finish(a1.id, failed())
    a2 = await claim(store)
    for attempt in (a2, b1):
        await store.append(full_call(attempt.id, "1"))
        await store.append(full_call(attempt.id, "2"))
        await store.emit(attempt.id, Reward(value=0.1))
        await store.emit(attempt.id, Reward(value=-2, key="style"))
        await store.emit(attempt.id, Reward(value=3, target=Target(turn=2, agent="planner")))
        await store.finish(attempt.id, Outcome(reward=0.1 + 0.2))
    await store.finish(c1.id, failed(FailureKind.BAD_REWARD))

    b, a = await store.trajectories(["c", "d", "b", "nobody", "a"])

    assert (b.attempt, a.attempt) == (b1, a2)
    assert a.calls == (full_call(a2.id, "1"), full_call(a2.id, "2"))
    assert b.calls == (full_call(b1.id, "1"), full_call(b1.id, "2"))
    planned = Reward(value=3, target=Target(turn=2, agent="planner"))
    assert a.rewards == (Reward(value=0.1), Reward(value=-2, key="style"), planned)
    assert a.reward == 0.1 + 0.2


async def test_a_trajectory_without_calls_or_rewards_is_one_too(store: Store) -> None:
    await store.enqueue([rollout("a")])
    await store.finish((await claim(store)).id, WON)
    [trajectory] = await store.trajectories(["a"])
    assert (trajectory.calls, trajectory.rewards, trajectory.reward) == ((), (), 1.0)


async def test_rewards_are_read_while_an_attempt_runs(store: Store) -> None:
    await store.enqueue([rollout("a"), rollout("b")])
    attempt, other = await claim(store), await claim(store)
    emitted = [Reward(value=1, key="k", target=Target(turn=2)), Reward(value=0.5)]
    for reward in emitted:
        await store.emit(attempt.id, reward)
    assert (await store.rewards(attempt.id), await store.rewards(other.id)) == (emitted, [])


async def test_a_reward_is_recorded_once_for_an_idempotency_key_of_its_attempt(
    store: Store,
) -> None:
    await store.enqueue([rollout("a"), rollout("b")])
    attempts = [await claim(store) for _ in range(2)]
    for attempt in attempts * 2:
        await store.emit(attempt.id, Reward(value=1), idempotency_key="one")
    await store.emit(attempts[0].id, Reward(value=1), idempotency_key="two")
    assert [len(await store.rewards(attempt.id)) for attempt in attempts] == [2, 1]


# ------------------------------------------------------------------ spans


async def test_text_that_no_encoding_has_comes_back(store: Store) -> None:
    lone = "a\udcff"
    await store.enqueue([rollout("a", max_attempts=1).model_copy(update={"task": {lone: lone}})])
    attempt = await claim(store)
    recorded = full_call(attempt.id).model_copy(update={"messages": ({"content": lone},)})
    for_agent = Reward(value=1, target=Target(agent=lone))
    failure = Failure(kind=FailureKind.AGENT, message=lone, traceback=lone)

    await store.append(recorded)
    await store.emit(attempt.id, for_agent)
    await store.record(attempt.id, [span(1, name=lone)])
    await store.finish(attempt.id, Outcome(failure=failure))

    assert attempt.rollout.task == {lone: lone}
    assert await store.rewards(attempt.id) == [for_agent]
    assert await store.spans(attempt.id) == [span(1, name=lone)]
    [trajectory] = await store.trajectories(["a"], failed=True)
    assert trajectory.calls == (recorded,)
    assert trajectory.failure is not None
    assert trajectory.failure.message == lone
    assert (await store.attempts("a"))[0].failure == failure
    assert await store.failures(["a"]) == {"a": f"agent: {lone}"}


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


async def test_failed_rollouts_are_read_back_if_asked_for(store: Store) -> None:
    await store.enqueue([rollout("a"), rollout("b", max_attempts=1), rollout("c", max_attempts=1)])
    a, b, c = await claim(store), await claim(store), await claim(store)
    await store.append(full_call(b.id))
    await store.finish(a.id, WON)
    await store.finish(b.id, failed(FailureKind.TIMEOUT))
    await store.finish(c.id, failed(FailureKind.BAD_REWARD))
    await store.enqueue([rollout("d")])  # never claimed
    await store.cancel(["d"])
    found = await store.trajectories(["d", "c", "b", "a"], failed=True)
    assert [each.attempt for each in found] == [c, b, a]
    assert found[1].calls == (full_call(b.id),)
    assert [each.failure and each.failure.kind for each in found] == ["bad_reward", "timeout", None]
    assert [each.reward for each in found] == [0.0, 0.0, 1.0]
