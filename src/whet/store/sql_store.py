"""The store on any SQL database: each method is one change or one read."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Concatenate, Generic, ParamSpec, Self, TypeVar

import anyio
from anyio import to_thread
from pydantic import JsonValue

from whet.errors import LeaseLost, StoreClosed, StoreError, WhetError, boundary
from whet.io.threads import resolve_all
from whet.protocols import Store
from whet.store.codec import pack_call, to_json
from whet.store.database import Database, Db, WorkItem, no_change
from whet.store.notify import ALL, end_key, work_key
from whet.store.queries import archive, calls, listing, resources, retention, steps
from whet.store.queries.idempotency import idempotent
from whet.store.queries.queue import Claim, OutcomeReport, Queue, list_unfinished, pack_rollout
from whet.store.queries.spans import insert_spans, read_owners, read_spans
from whet.store.queries.tables import check_name, find_statuses
from whet.types import (
    NO_ADVANTAGES,
    Attempt,
    AttemptId,
    AttemptRecord,
    Call,
    GenerationId,
    Mode,
    Outcome,
    Resource,
    Reward,
    Rollout,
    RolloutRecord,
    RunSize,
    Span,
    Status,
    StepRecord,
    Trajectory,
    WorkerRecord,
)

A = TypeVar("A")
K = TypeVar("K")
T = TypeVar("T")
P = ParamSpec("P")


class SQLStore(Store):
    """One run of a database, usable from several event loops and threads at once.

    A write is durable when its method returns, and every read begun after that sees it.
    """

    def __init__(
        self,
        database: Database,
        queue: Queue,
        run: str,
        *,
        owns: bool = True,
        key: str | None = None,
    ) -> None:
        """Use a run of a database; `close` closes a database that the store `owns`."""
        self.run = check_name(run)
        self._database = database
        self._queue = queue
        self._owns = owns
        self._key = key
        self._read_status = BatchedRead[AttemptId, Status](
            database, lambda db, attempts: find_statuses(db, self.run, attempts)
        )

    def for_run(self, run: str) -> "SQLStore":
        return SQLStore(self._database, self._queue, run, owns=False)

    def idempotent(self, key: str) -> "SQLStore":
        """The same run, for one change that is executed once for an idempotency key.

        A claim with a key that claimed before returns the same attempt; it raises LeaseLost if
        that attempt has ended or was given back.
        """
        return SQLStore(self._database, self._queue, self.run, owns=False, key=key)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._owns:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(self._database.close)

    # ------------------------------------------------------------------ the queue

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        with boundary(StoreError, "rollouts cannot be stored"):
            packed = [pack_rollout(rollout) for rollout in rollouts]
        await self._write(self._bind_run(self._queue.enqueue, rollouts=packed))

    async def claim(self, worker: str, *, lease_s: float, wait_s: float) -> Attempt | None:
        attempt = await self._claim_now(worker, lease_s, wait_s)
        if attempt is not None or wait_s <= 0:
            return attempt
        deadline = anyio.current_time() + wait_s
        with self._database.notifier.subscribe([work_key(self.run)]) as changes:
            while True:
                left_s = max(deadline - anyio.current_time(), 0.0)
                attempt = await self._claim_now(worker, lease_s, left_s)
                if attempt is not None:
                    return attempt
                with anyio.move_on_after(deadline - anyio.current_time()) as scope:
                    await changes.wait()
                if scope.cancelled_caught:
                    return None

    async def heartbeat(self, attempt: AttemptId, *, lease_s: float) -> None:
        change = self._bind_run(self._queue.heartbeat, attempt=attempt, lease_s=lease_s)
        if not await self._write(change):
            raise LeaseLost(f"attempt {attempt!r} has ended: it exceeded its time limit")

    async def finish(self, attempt: AttemptId, outcome: Outcome) -> None:
        try:
            await self._write_batched(self._queue.finish, OutcomeReport(attempt, outcome))
        except LeaseLost:
            late = self._bind_run(self._queue.keep_late, attempt=attempt, outcome=outcome)
            await self._write(late)
            raise

    async def wait(self, rollouts: Sequence[str]) -> None:
        keys = {end_key(self.run, rollout): rollout for rollout in rollouts}
        with self._database.notifier.subscribe(keys) as changes:
            await self._submit(no_change())  # expires leases that ended since the last write
            pending = set(rollouts)
            while True:
                read = self._bind_run(list_unfinished, rollouts=list(pending))
                pending = set(await self._read(read))
                if not pending:
                    return
                # One read once all were notified, instead of one for each that ends.
                left = pending
                while left:
                    received = await changes.wait()
                    left = set[str]() if ALL in received else left - {keys[key] for key in received}

    async def cancel(self, rollouts: Sequence[str]) -> int:
        return await self._write(self._bind_run(self._queue.cancel, rollouts=rollouts))

    async def ended(self, attempt: AttemptId) -> Status:
        with self._database.notifier.subscribe([end_key(self.run, attempt)]) as changes:
            while True:
                status = await self._read_status(attempt)
                if status is not Status.RUNNING:
                    return status
                await changes.wait()

    async def give_back(self, key: str) -> None:
        """Undo the claim of an idempotency key whose caller is gone, even if it arrives later.

        Raises:
            StoreError: the attempt has begun.
        """
        await self._write(self._bind_run(self._queue.give_back, key=key))

    async def release_workers(self) -> int:
        return await self._write(self._bind_run(self._queue.release))

    # ------------------------------------------------------------------ calls, rewards, spans

    async def attempt(self, attempt: AttemptId) -> Attempt:
        return await self._read(self._bind_run(calls.read_attempt, attempt=attempt))

    async def append(self, call: Call) -> None:
        await self._write_batched(calls.append, pack_call(call))

    async def emit(
        self, attempt: AttemptId, reward: Reward, *, idempotency_key: str | None = None
    ) -> None:
        change = self._bind_run(calls.emit, attempt=attempt, reward=reward)
        if idempotency_key is not None:
            key = f"{attempt}/{idempotency_key}"
            change = idempotent(change, self.run, key, self._queue.clock())
        await self._write(change)

    async def rewards(self, attempt: AttemptId) -> list[Reward]:
        return await self._read(self._bind_run(calls.read_rewards, attempt=attempt))

    async def calls(self, attempt: AttemptId) -> list[Call]:
        return await self._read(self._bind_run(calls.read_calls, attempt=attempt))

    async def trajectories(
        self, rollouts: Sequence[str], *, failed: bool = False
    ) -> list[Trajectory]:
        return await self._read(
            self._bind_run(calls.read_trajectories, rollouts=rollouts, failed=failed)
        )

    async def failures(self, rollouts: Sequence[str]) -> dict[str, str]:
        return await self._read(self._bind_run(calls.read_failures, rollouts=rollouts))

    async def record(self, attempt: AttemptId, spans: Sequence[Span]) -> None:
        await self._write(self._bind_run(insert_spans, attempt=attempt, spans=spans))

    async def spans(self, attempt: AttemptId) -> list[Span]:
        return await self._read(self._bind_run(read_spans, attempt=attempt))

    async def owners(self, ids: Sequence[str]) -> dict[str, AttemptId]:
        """Read the attempt of each trace that has spans of exactly one attempt."""
        return await self._read(self._bind_run(read_owners, ids=ids))

    # ------------------------------------------------------------------ training steps

    async def commit(
        self,
        record: StepRecord,
        *,
        advantages: Mapping[GenerationId, float] = NO_ADVANTAGES,
        epoch: int | None = None,
    ) -> None:
        now = self._queue.clock()
        change = self._bind_run(
            steps.commit, record=record, advantages=advantages, now=now, epoch=epoch
        )
        await self._write(change)

    async def steps(self, *, after: int = -1, limit: int | None = None) -> list[StepRecord]:
        return await self._read(self._bind_run(steps.read_steps, after=after, limit=limit))

    async def advantages(self, step: int) -> dict[GenerationId, float]:
        return await self._read(self._bind_run(steps.read_advantages, step=step))

    # ------------------------------------------------------------------ resources

    async def publish(self, name: str, value: JsonValue, *, epoch: int | None = None) -> int:
        with boundary(StoreError, "the resource cannot be stored"):
            packed = to_json(value)
        now = self._queue.clock()
        change = self._bind_run(
            resources.publish, name=check_name(name), value=packed, now=now, epoch=epoch
        )
        return await self._write(change)

    async def get(self, name: str, version: int) -> Resource:
        return await self._read(self._bind_run(resources.read_resource, name=name, version=version))

    async def latest(self, name: str) -> Resource:
        return await self._read(self._bind_run(resources.read_resource, name=name, version=None))

    async def resources(self) -> list[Resource]:
        return await self._read(self._bind_run(resources.read_resources))

    # ------------------------------------------------------------------ listings

    async def rollouts(
        self,
        *,
        status: Status | None = None,
        mode: Mode | None = None,
        group: str | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> list[RolloutRecord]:
        page = self._bind_run(
            listing.read_rollouts,
            status=status,
            mode=mode,
            group=group,
            after=after,
            limit=limit,
        )
        return await self._read(page)

    async def attempts(self, rollout: str) -> list[AttemptRecord]:
        return await self._read(self._bind_run(listing.read_attempts, rollout=rollout))

    async def workers(self) -> list[WorkerRecord]:
        return await self._read(self._bind_run(listing.read_workers))

    async def counts(self) -> dict[str, int]:
        return await self._read(self._bind_run(listing.read_counts))

    async def overview(self) -> listing.Overview:
        """Count rollouts and workers of all runs of the database."""
        now = self._queue.clock()
        return await self._read(lambda db: listing.read_overview(db, now), is_long=True)

    async def browse(
        self, query: Callable[Concatenate[Db, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run one of `queries.browse` on this run, without delaying other reads."""
        return await self._read(self._bind_run(query, *args, **kwargs), is_long=True)

    @property
    def expired_leases(self) -> int:
        """Leases that expired and ended their attempts, since this process started."""
        return len(self._queue.expired)

    # ------------------------------------------------------------------ retention

    async def size(self) -> dict[str, RunSize]:
        return await self._read(retention.read_sizes, is_long=True)

    async def prune(self, before: float) -> int:
        return await self._write(self._bind_run(retention.prune, before=before))

    async def drop(self) -> None:
        def drop_and_notify(db: Db) -> None:
            retention.drop(db, self.run)
            self._database.notifier.mark(ALL)  # what waits for the run's rollouts raises NotFound

        await self._write(drop_and_notify)

    async def vacuum(self) -> None:
        await self._submit(WorkItem(self._vacuum, in_transaction=False))

    def _vacuum(self, db: Db, _: object) -> list[None]:
        for statement in self._database.vacuum:
            db.execute(statement)
        return [None]

    async def export(self, file: Path) -> None:
        read = self._bind_run(archive.export_run, file=file)
        await self._read(read, is_long=True)

    async def load(self, file: Path) -> None:
        now = self._queue.clock()
        await self._write(self._bind_run(archive.load_run, file=file, now=now))

    # ------------------------------------------------------------------ changes and reads

    def _bind_run(
        self, query: Callable[Concatenate[Db, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[Db], T]:
        """Bind a query to this run; the connection comes later."""
        return lambda db: query(db, self.run, *args, **kwargs)

    async def _write(self, change: Callable[[Db], T]) -> T:
        if self._key is not None:
            change = idempotent(change, self.run, self._key, self._queue.clock())
        return await self._submit(WorkItem(lambda db, _: [change(db)]))

    async def _write_batched(
        self, change: Callable[[Db, str, Sequence[A]], Sequence[T | WhetError]], argument: A
    ) -> T:
        """Apply a change that is idempotent without a key, in a batch with others of its kind."""
        return await self._submit(self._build_item(change, argument))

    def _build_item(
        self, change: Callable[[Db, str, Sequence[A]], Sequence[T | WhetError]], argument: A
    ) -> WorkItem[T]:
        run = self.run
        return WorkItem(
            lambda db, arguments: change(db, run, arguments), argument, kind=(change, run)
        )

    def _submit(self, item: WorkItem[T]) -> asyncio.Future[T]:
        item.future = asyncio.get_running_loop().create_future()
        self._database.submit(item)
        return item.future

    async def _read(self, read: Callable[[Db], T], *, is_long: bool = False) -> T:
        start = self._database.read_long if is_long else self._database.read
        try:
            result = start(read)
        except RuntimeError as error:
            raise StoreClosed("the store is closed") from error
        return await asyncio.wrap_future(result)

    async def _claim_now(self, worker: str, lease_s: float, wait_s: float) -> Attempt | None:
        claim = Claim(worker, lease_s, wait_s, self._key)
        claimed = self._submit(self._build_item(self._queue.claim, claim))
        try:
            return await asyncio.shield(claimed)
        except asyncio.CancelledError:
            # The commit may be under way: an attempt without a worker would block its rollout
            # until its lease expired, and use up one of its attempts.
            claimed.add_done_callback(self._unclaim)
            raise

    def _unclaim(self, claimed: asyncio.Future[Attempt | None]) -> None:
        if claimed.cancelled() or claimed.exception() is not None:
            return
        attempt = claimed.result()
        if attempt is not None:
            with suppress(StoreError):  # the store is closed: the lease will expire
                unclaim = self._bind_run(self._queue.unclaim, attempt=attempt.id, key=self._key)
                self._database.submit(WorkItem(lambda db, _: [unclaim(db)]))


class BatchedRead(Generic[K, T]):
    """A read of one key; one query answers all callers that waited when it began.

    A read by itself costs two switches between threads, more than its query.
    """

    def __init__(
        self, database: Database, read: Callable[[Db, Sequence[K]], Sequence[T | WhetError]]
    ) -> None:
        """`read` returns the result of each key, or an error that is raised for its caller."""
        self._database = database
        self._read = read
        self._lock = threading.Lock()
        self._waiting: list[tuple[K, asyncio.Future[T]]] = []

    async def __call__(self, key: K) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._lock:
            batch, is_first = self._waiting, not self._waiting
            batch.append((key, future))
        if is_first:
            self._start(batch)
        return await future

    def _start(self, batch: list[tuple[K, asyncio.Future[T]]]) -> None:
        def read(db: Db) -> Sequence[T | WhetError]:
            self._close(batch)
            return self._read(db, [key for key, _ in batch])

        def resolve(done: Future[Sequence[T | WhetError]]) -> None:
            self._close(batch)
            error = done.exception()
            results = done.result() if error is None else [error] * len(batch)
            resolve_all(
                (future, result) for (_, future), result in zip(batch, results, strict=True)
            )

        try:
            self._database.read(read).add_done_callback(resolve)
        except RuntimeError:
            closed = Future[Sequence[T | WhetError]]()
            closed.set_exception(StoreClosed("the store is closed"))
            resolve(closed)

    def _close(self, batch: list[tuple[K, asyncio.Future[T]]]) -> None:
        """Let later callers wait for another query."""
        with self._lock:
            if self._waiting is batch:
                self._waiting = []
