"""The queue against a model of it, with concurrent workers and a clock that the test sets."""

import math
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import anyio
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from support.servers.postgres_server import own_schema
from whet.errors import LeaseLost
from whet.protocols import Store
from whet.store.http.client import HTTPStore
from whet.store.http.server import StoreServer
from whet.store.postgres import PostgresStore
from whet.store.sqlite import SQLiteStore
from whet.types import (
    NO_FAULT,
    TERMINAL,
    Attempt,
    AttemptId,
    Call,
    CallId,
    Failure,
    FailureKind,
    Outcome,
    Rollout,
    Status,
)

LEASE_S = 10.0
TIMEOUT_S = 300
"""Only against waiting for ever: thirty rollouts are a hundred commits one after another, and a
busy disk takes seconds for one. Leases expire by the clock below."""
LOST = FailureKind.WORKER_LOST
PICKS = st.integers(0, 59)
"""Which of the attempts so far. Not a bundle of them: the winner of a race is not determined, and
what is drawn must not depend on it."""

Open = Callable[[ExitStack, "Clock"], list[Store]]
"""Opens stores on one new database: the first for most, all of them in races."""


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Model:
    """The expected state of a rollout."""

    rollout: Rollout
    order: int
    status: Status = Status.QUEUED
    attempts: int = 0
    tries_left: int = 0
    lease_until: float = math.inf
    late: dict[str, int] = field(default_factory=dict[str, int])
    ends: dict[str, Outcome] = field(default_factory=dict[str, Outcome])
    """How workers ended its attempts."""

    @property
    def attempt(self) -> str:
        return f"{self.rollout.id}.{self.attempts}"

    def is_claimable(self, now: float) -> bool:
        return self.status is Status.QUEUED or (
            self.status is Status.RUNNING
            and self.lease_until <= now
            and self.tries_left > 0
            and LOST in self.rollout.retried
        )

    def claim(self, now: float) -> None:
        self.status, self.attempts = Status.RUNNING, self.attempts + 1
        self.tries_left, self.lease_until = self.tries_left - 1, now + LEASE_S

    def end(self, outcome: Outcome) -> None:
        failure = outcome.failure
        self.ends[self.attempt] = outcome
        if failure and failure.kind in self.rollout.retried:
            self.tries_left += failure.kind in NO_FAULT
            self.status = Status.QUEUED if self.tries_left > 0 else outcome.status
        else:
            self.status = outcome.status

    def expire(self, now: float) -> None:
        is_over = self.status is Status.RUNNING and self.lease_until <= now
        if is_over and not self.is_claimable(now):
            self.status = Status.FAILED


KINDS = st.sampled_from([kind for kind in FailureKind if kind is not FailureKind.CANCELED])
OUTCOMES = st.one_of(
    st.floats(-1, 1).map(lambda reward: Outcome(reward=reward)),
    KINDS.map(lambda kind: Outcome(failure=Failure(kind=kind, message="it broke"))),
)


def call(attempt: AttemptId) -> Call:
    return Call(
        id=CallId("c"),
        attempt=attempt,
        parent=None,
        root="root",
        messages=(),
        prompt_suffix=(1, 2, 3),
        prompt_length=3,
        prompt_digest="digest",
        generations=(),
        created=0.0,
    )


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    return Rollout(
        id=f"r{draw(st.integers(0, 30))}",
        task=draw(st.integers(0, 3)),
        group="g",
        timeout_s=1e9,
        priority=draw(st.integers(-1, 1)),
        max_attempts=draw(st.integers(1, 3)),
        retried=tuple(draw(st.sets(KINDS))),
    )


class QueueMachine(RuleBasedStateMachine):
    """Does what orderers and workers do, in any order and some of it at once."""

    def __init__(self, open_: Open) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.clock = Clock()
        self.portal: BlockingPortal = self.stack.enter_context(start_blocking_portal())
        self.stores = open_(self.stack, self.clock)
        self.store = self.stores[0]
        self.models: dict[str, Model] = {}
        self.attempts: list[str] = []
        """All that were claimed, in the order of their ids within a claim."""

    def teardown(self) -> None:
        async def close() -> None:
            for store in self.stores:
                await store.close()

        self.portal.call(close)
        self.stack.close()

    def at_once(self, *acts: Callable[[], Awaitable[object]]) -> list[object]:
        """Run acts concurrently; their results, LeaseLost itself where it was raised."""
        gave: list[object] = [None] * len(acts)

        async def do(n: int, act: Callable[[], Awaitable[object]]) -> None:
            try:
                gave[n] = await act()
            except LeaseLost as error:
                gave[n] = error

        async def run() -> None:
            with anyio.fail_after(TIMEOUT_S):
                async with anyio.create_task_group() as group:
                    for n, act in enumerate(acts):
                        group.start_soon(do, n, act)

        self.portal.call(run)
        return gave

    def claimable(self) -> list[Model]:
        found = [m for m in self.models.values() if m.is_claimable(self.clock.now)]
        return sorted(found, key=lambda m: (-m.rollout.priority, m.order))

    def picked(self, pick: int) -> list[str]:
        """One of the attempts, if there is any."""
        return [self.attempts[pick % len(self.attempts)]] if self.attempts else []

    def model_of(self, attempt: str) -> Model:
        return self.models[attempt.rpartition(".")[0]]

    def is_current(self, attempt: str) -> bool:
        model = self.model_of(attempt)
        return model.status is Status.RUNNING and model.attempt == attempt

    # -------------------------------------------------------------- what orderers do

    @rule(batch=st.lists(rollouts(), max_size=6))
    def enqueue(self, batch: list[Rollout]) -> None:
        self.at_once(lambda: self.store.enqueue(batch))
        for rollout in batch:
            if rollout.id not in self.models:
                self.models[rollout.id] = Model(
                    rollout, len(self.models), tries_left=rollout.max_attempts
                )

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ids = (
            data.draw(st.lists(st.sampled_from(sorted(self.models)), max_size=3))
            if (self.models)
            else []
        )
        open_ = {id_ for id_ in ids if self.models[id_].status not in TERMINAL}
        assert self.at_once(lambda: self.store.cancel(ids)) == [len(open_)]
        for id_ in open_:
            self.models[id_].status = Status.FAILED

    # -------------------------------------------------------------- what workers do

    @rule(count=st.integers(1, 4))
    def claim(self, count: int) -> None:
        """Several at once in one process take the first ones, each another."""
        expected = self.claimable()[:count]
        gave = self.at_once(
            *(lambda: self.store.claim("w", lease_s=LEASE_S, wait_s=0) for _ in range(count))
        )
        claimed = [attempt for attempt in gave if isinstance(attempt, Attempt)]
        for model in expected:
            model.claim(self.clock.now)
        assert sorted(a.id for a in claimed) == sorted(m.attempt for m in expected)
        assert [a.rollout for a in claimed if a.rollout != self.model_of(a.id).rollout] == []
        self.attempts += sorted(attempt.id for attempt in claimed)

    @rule(count=st.integers(2, 6))
    def claim_from_everywhere(self, count: int) -> None:
        """Several processes at once: none is claimed twice, and nothing that may not be."""
        claimable = {model.rollout.id for model in self.claimable()}

        def of(store: Store) -> Callable[[], Awaitable[object]]:
            return lambda: store.claim("w", lease_s=LEASE_S, wait_s=0)

        gave = self.at_once(*(of(self.stores[n % len(self.stores)]) for n in range(count)))
        claimed = [attempt for attempt in gave if isinstance(attempt, Attempt)]
        ids = [attempt.rollout.id for attempt in claimed]
        assert len(set(ids)) == len(ids)
        assert set(ids) <= claimable
        for attempt in claimed:
            model = self.models[attempt.rollout.id]
            model.claim(self.clock.now)
            assert model.attempt == attempt.id
        self.attempts += sorted(attempt.id for attempt in claimed)

    @rule(picked=st.lists(st.tuples(PICKS, OUTCOMES), max_size=4))
    def finish(self, picked: list[tuple[int, Outcome]]) -> None:
        chosen = list({attempt: o for pick, o in picked for attempt in self.picked(pick)}.items())

        def of(attempt: str, outcome: Outcome) -> Callable[[], Awaitable[object]]:
            return lambda: self.store.finish(AttemptId(attempt), outcome)

        gave = self.at_once(*(of(*pair) for pair in chosen))
        for (attempt, outcome), answer in zip(chosen, gave, strict=True):
            model = self.model_of(attempt)
            if self.is_current(attempt):
                assert answer is None
                model.end(outcome)
            elif model.ends.get(attempt) == outcome:
                assert answer is None
            else:
                assert isinstance(answer, LeaseLost)
                model.late[attempt] = model.late.get(attempt, 0) + 1

    @rule(pick=PICKS)
    def heartbeat(self, pick: int) -> None:
        for attempt in self.picked(pick):
            self.keep_lease(attempt)

    def keep_lease(self, attempt: str) -> None:
        [gave] = self.at_once(lambda: self.store.heartbeat(AttemptId(attempt), lease_s=LEASE_S))
        assert isinstance(gave, LeaseLost) is not self.is_current(attempt)
        if self.is_current(attempt):
            self.model_of(attempt).lease_until = self.clock.now + LEASE_S

    @rule(pick=PICKS, outcome=OUTCOMES)
    def everybody_wants_another_end(self, pick: int, outcome: Outcome) -> None:
        """Two reports and a cancel at once: one of them counts, and the others are refused."""
        for attempt in self.picked(pick):
            self.attempts.remove(attempt)
            self.end_three_times(attempt, outcome)

    def end_three_times(self, attempt: str, outcome: Outcome) -> None:
        model, current = self.model_of(attempt), self.is_current(attempt)
        before = model.status
        reports = [outcome, Outcome(reward=7.0)]
        first, last = self.stores[0], self.stores[-1]
        a, b, canceled = self.at_once(
            lambda: first.finish(AttemptId(attempt), reports[0]),
            lambda: last.finish(AttemptId(attempt), reports[1]),
            lambda: last.cancel([model.rollout.id]),
        )
        taken = [r for r, gave in zip(reports, (a, b), strict=True) if gave is None]
        model.late[attempt] = model.late.get(attempt, 0) + 2 - len(taken)
        if current and taken:
            model.end(taken[0])
        assert taken in ([], [model.ends.get(attempt)])
        ended_before_cancel = model.status in TERMINAL
        assert canceled == (not ended_before_cancel)
        if canceled:
            model.status = Status.FAILED
        assert before not in TERMINAL or model.status is before

    @rule(workers=st.integers(1, 6))
    def work_off_all_there_is(self, workers: int) -> None:
        """Workers of all processes at once: each rollout is done by one of them, in time."""
        claimable = self.claimable()
        for model in claimable:
            model.claim(self.clock.now)
        done: list[str] = []

        async def work(store: Store) -> None:
            # Another process may hold what is left for a moment: wait as long as that takes.
            while attempt := await store.claim("w", lease_s=LEASE_S, wait_s=0.05):
                await store.append(call(attempt.id))
                await store.finish(attempt.id, Outcome(reward=1.0))
                done.append(attempt.id)

        def of(store: Store) -> Callable[[], Awaitable[object]]:
            return lambda: work(store)

        gave = self.at_once(*(of(self.stores[n % len(self.stores)]) for n in range(workers)))
        assert gave == [None] * workers
        assert sorted(done) == sorted(model.attempt for model in claimable)
        if workers == 1:  # the highest priority first, and the oldest among equals
            assert done == [model.attempt for model in claimable]
        for model in claimable:
            model.end(Outcome(reward=1.0))
        recorded = self.portal.call(self.store.trajectories, [m.rollout.id for m in claimable])
        assert [[c.id for c in t.calls] for t in recorded] == [["c"]] * len(claimable)

    # -------------------------------------------------------------- time, and what must hold

    @rule(seconds=st.sampled_from([1.0, 5.0, 9.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.at_once(*(lambda s=store: s.wait([]) for store in self.stores))
        for model in self.models.values():
            model.expire(self.clock.now)

    @initialize()
    def nothing_is_there(self) -> None:
        assert self.at_once(lambda: self.store.rollouts()) == [[]]

    @invariant()
    def the_store_is_as_the_model(self) -> None:
        async def look() -> tuple[dict[str, tuple[Status, int]], list[str], list[str]]:
            records = await self.stores[-1].rollouts(limit=1000)
            workers = await self.stores[-1].workers()
            return (
                {r.rollout.id: (r.status, r.attempts) for r in records},
                [r.rollout.id for r in records],
                [attempt for worker in workers for attempt in worker.running],
            )

        stored, order, running = self.portal.call(look)
        assert stored == {id_: (m.status, m.attempts) for id_, m in self.models.items()}
        assert order == sorted(order, key=lambda id_: self.models[id_].order)
        current = [m.attempt for m in self.models.values() if m.status is Status.RUNNING]
        assert sorted(running) == sorted(current)

    @rule()
    def late_reports_are_kept(self) -> None:
        async def late(ids: Sequence[str]) -> dict[str, int]:
            records = [record for id_ in ids for record in await self.store.attempts(id_)]
            return {record.id: len(record.late) for record in records if record.late}

        expected: dict[str, int] = {}
        for model in self.models.values():
            expected |= {attempt: n for attempt, n in model.late.items() if n}
        assert self.portal.call(late, list(self.models)) == expected


@contextmanager
def folder() -> Generator[Path]:
    with TemporaryDirectory() as name:
        yield Path(name)


def on_sqlite(stack: ExitStack, clock: Clock) -> list[Store]:
    """Two processes, from the file's point of view."""
    file = stack.enter_context(folder()) / "store.db"
    return [SQLiteStore(file, clock=clock) for _ in range(2)]


def on_http(stack: ExitStack, clock: Clock) -> list[Store]:
    """Two clients of one server, and a store beside it."""
    served = SQLiteStore(stack.enter_context(folder()) / "store.db", clock=clock)
    stack.callback(lambda: anyio.run(served.close))
    server = StoreServer(served, token="token")
    stack.callback(server.close)
    clients = [HTTPStore.connect(server.url, token="token", patience_s=10) for _ in range(2)]
    return [clients[0], served.for_run(served.run), clients[1]]


def check(open_: Open, examples: int) -> None:
    run_state_machine_as_test(
        cast(type[QueueMachine], lambda: QueueMachine(open_)),  # any callable that returns one
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            suppress_health_check=cast(list[HealthCheck], list(HealthCheck)),
        ),
    )


def test_the_queue_on_sqlite_does_what_the_model_does() -> None:
    check(on_sqlite, examples=10)


def test_the_queue_on_postgres_does_what_the_model_does(postgres_url: str) -> None:
    def on_postgres(stack: ExitStack, clock: Clock) -> list[Store]:
        schema = stack.enter_context(own_schema(postgres_url))
        return [PostgresStore(postgres_url, schema=schema, clock=clock) for _ in range(2)]

    check(on_postgres, examples=4)


def test_the_queue_over_http_does_what_the_model_does() -> None:
    check(on_http, examples=3)


@pytest.mark.slow
def test_the_queue_over_http_does_what_the_model_does_at_length() -> None:
    check(on_http, examples=100)


@pytest.mark.slow
def test_the_queue_on_sqlite_does_what_the_model_does_at_length() -> None:
    check(on_sqlite, examples=300)


@pytest.mark.slow
def test_the_queue_on_postgres_does_what_the_model_does_at_length(postgres_url: str) -> None:
    def on_postgres(stack: ExitStack, clock: Clock) -> list[Store]:
        schema = stack.enter_context(own_schema(postgres_url))
        return [PostgresStore(postgres_url, schema=schema, clock=clock) for _ in range(3)]

    check(on_postgres, examples=60)
