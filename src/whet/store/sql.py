"""The store's protocols on any database: what is asked becomes changes and reads."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar

import anyio
from anyio import to_thread
from pydantic import JsonValue, TypeAdapter

from whet.errors import LeaseLost, StoreError, WhetError, boundary
from whet.protocols import Store
from whet.store import archive, directory, log, resources, runs, steps, tickets, traces
from whet.store.attempts import find_attempt
from whet.store.bell import EVERYONE, end_of, work_in
from whet.store.database import Bulk, Database, Db, nothing
from whet.store.packed import (
    PackedCall,
    PackedTrajectory,
    pack_call,
    unpack_call,
    unpack_trajectory,
)
from whet.store.queue import Claim, Queue, Report, pack_rollout, unfinished
from whet.types import (
    Attempt,
    AttemptId,
    AttemptRecord,
    Call,
    Mode,
    Name,
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
T = TypeVar("T")
P = ParamSpec("P")

_NAME = TypeAdapter[str](Name)

DEFAULT_RUN = "default"


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
        ticket: str | None = None,
    ) -> None:
        """Closing a store that `owns` its database closes that too."""
        with boundary(StoreError, "run"):
            self.run = _NAME.validate_python(run)
        self._database = database
        self._queue = queue
        self._owns = owns
        self._ticket = ticket

    def for_run(self, run: str) -> "SQLStore":
        return SQLStore(self._database, self._queue, run, owns=False)

    def once(self, ticket: str) -> "SQLStore":
        """The same run, for one change: asked again with the same ticket, it is not done again.

        A claim with a ticket that claimed before gives the same attempt; LeaseLost if that has
        ended or was given back.
        """
        return SQLStore(self._database, self._queue, self.run, owns=False, ticket=ticket)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._owns:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(self._database.close)

    # ------------------------------------------------------------------ the queue

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        with boundary(StoreError, "rollouts cannot be stored"):
            packed = [pack_rollout(rollout) for rollout in rollouts]
        await self._write(self._in_run(self._queue.enqueue, rollouts=packed))

    async def claim(self, worker: str, *, lease_s: float, wait_s: float) -> Attempt | None:
        attempt = await self._claim_now(worker, lease_s, wait_s)
        if attempt is not None or wait_s <= 0:
            return attempt
        deadline = anyio.current_time() + wait_s
        with self._database.bell.listening([work_in(self.run)]) as listener:
            while True:
                left_s = max(deadline - anyio.current_time(), 0.0)
                attempt = await self._claim_now(worker, lease_s, left_s)
                if attempt is not None:
                    return attempt
                with anyio.move_on_after(deadline - anyio.current_time()) as scope:
                    await listener.wait()
                if scope.cancelled_caught:
                    return None

    async def heartbeat(self, attempt: AttemptId, *, lease_s: float) -> None:
        change = self._in_run(self._queue.heartbeat, attempt=attempt, lease_s=lease_s)
        if not await self._write(change):
            raise LeaseLost(f"attempt {attempt!r} has ended: it outlived its limit")

    async def finish(self, attempt: AttemptId, outcome: Outcome) -> None:
        try:
            await self._write_in_bulk(self._queue.finish, Report(attempt, outcome))
        except LeaseLost:
            late = self._in_run(self._queue.keep_late, attempt=attempt, outcome=outcome)
            await self._write(late)
            raise

    async def wait(self, rollouts: Sequence[str]) -> None:
        keys = {end_of(self.run, rollout): rollout for rollout in rollouts}
        with self._database.bell.listening(keys) as listener:
            await self._write(nothing)  # upkeep: leases may have run out since the last write
            pending = set(rollouts)
            asked = pending
            while True:
                still = await self._read(self._in_run(unfinished, rollouts=list(asked)))
                pending -= asked - set(still)
                if not pending:
                    return
                heard = await listener.wait()
                asked = pending if EVERYONE in heard else {keys[key] for key in heard}

    async def cancel(self, rollouts: Sequence[str]) -> int:
        return await self._write(self._in_run(self._queue.cancel, rollouts=rollouts))

    async def ended(self, attempt: AttemptId) -> Status:
        with self._database.bell.listening([end_of(self.run, attempt)]) as listener:
            while True:
                _, status = await self._read(self._in_run(find_attempt, attempt=attempt))
                if status is not Status.RUNNING:
                    return status
                await listener.wait()

    async def give_back(self, ticket: str) -> None:
        """Undo the claim of a ticket, though it may come only now: its caller is gone.

        Raises:
            StoreError: the attempt has begun.
        """
        await self._write(self._in_run(self._queue.give_back, ticket=ticket))

    async def release_workers(self) -> int:
        return await self._write(self._in_run(self._queue.release))

    # ------------------------------------------------------------------ the log

    async def attempt(self, attempt: AttemptId) -> Attempt:
        read = self._in_run(log.read_attempt, attempt=attempt)
        return await self._read(read, small=True)

    async def append(self, call: Call) -> None:
        await self.append_packed(pack_call(call))

    async def append_packed(self, call: PackedCall) -> None:
        """The same for a call that came packed."""
        await self._write_in_bulk(log.append, call)

    async def emit(self, attempt: AttemptId, reward: Reward) -> None:
        await self._write(self._in_run(log.emit, attempt=attempt, reward=reward))

    async def rewards(self, attempt: AttemptId) -> list[Reward]:
        return await self._read(self._in_run(log.read_rewards, attempt=attempt))

    async def calls(self, attempt: AttemptId) -> list[Call]:
        read = self._in_run(log.read_calls, attempt=attempt)
        return await self._read(lambda db: [unpack_call(call) for call in read(db)], small=True)

    async def packed_calls(self, attempt: AttemptId) -> list[PackedCall]:
        """The same to be sent on."""
        return await self._read(self._in_run(log.read_calls, attempt=attempt))

    async def trajectories(self, rollouts: Sequence[str]) -> list[Trajectory]:
        read = self._in_run(log.read_trajectories, rollouts=rollouts)
        return await self._read(lambda db: [unpack_trajectory(each) for each in read(db)])

    async def packed_trajectories(self, rollouts: Sequence[str]) -> list[PackedTrajectory]:
        """The same to be sent on."""
        return await self._read(self._in_run(log.read_trajectories, rollouts=rollouts))

    async def failures(self, rollouts: Sequence[str]) -> dict[str, str]:
        return await self._read(self._in_run(log.read_failures, rollouts=rollouts))

    async def record(self, attempt: AttemptId, spans: Sequence[Span]) -> None:
        await self._write(self._in_run(traces.record, attempt=attempt, spans=spans))

    async def spans(self, attempt: AttemptId) -> list[Span]:
        return await self._read(self._in_run(traces.read_spans, attempt=attempt))

    async def owners(self, ids: Sequence[str]) -> dict[str, AttemptId]:
        """Whose traces these are, of those that have spans of exactly one attempt."""
        return await self._read(self._in_run(traces.read_owners, ids=ids))

    # ------------------------------------------------------------------ the steps

    async def commit(self, record: StepRecord) -> None:
        now = self._queue.clock()
        await self._write(self._in_run(steps.commit, record=record, now=now))

    async def steps(self, *, after: int = -1, limit: int | None = None) -> list[StepRecord]:
        return await self._read(self._in_run(steps.read_steps, after=after, limit=limit))

    # ------------------------------------------------------------------ resources

    async def publish(self, name: str, value: JsonValue) -> int:
        with boundary(StoreError, "the resource cannot be stored"):
            packed, name = resources.pack_value(value), _NAME.validate_python(name)
        now = self._queue.clock()
        return await self._write(self._in_run(resources.publish, name=name, value=packed, now=now))

    async def get(self, name: str, version: int) -> Resource:
        return await self._read(self._in_run(resources.read_resource, name=name, version=version))

    async def latest(self, name: str) -> Resource:
        return await self._read(self._in_run(resources.read_resource, name=name, version=None))

    async def resources(self) -> list[Resource]:
        return await self._read(self._in_run(resources.read_resources))

    # ------------------------------------------------------------------ what is there

    async def rollouts(
        self,
        *,
        status: Status | None = None,
        mode: Mode | None = None,
        group: str | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> list[RolloutRecord]:
        page = self._in_run(
            directory.read_rollouts,
            status=status,
            mode=mode,
            group=group,
            after=after,
            limit=limit,
        )
        return await self._read(page)

    async def attempts(self, rollout: str) -> list[AttemptRecord]:
        return await self._read(self._in_run(directory.read_attempts, rollout=rollout))

    async def workers(self) -> list[WorkerRecord]:
        return await self._read(self._in_run(directory.read_workers))

    async def counts(self) -> dict[str, int]:
        return await self._read(self._in_run(directory.read_counts))

    async def overview(self) -> directory.Overview:
        """All runs of the database at a glance."""
        now = self._queue.clock()
        read = self._database.read_long(lambda db: directory.read_overview(db, now))
        return await asyncio.wrap_future(read)

    @property
    def expired_leases(self) -> int:
        """Leases that ran out and cost a worker its attempt, since this process started."""
        return self._queue.expired

    # ------------------------------------------------------------------ retention

    async def size(self) -> dict[str, RunSize]:
        return await asyncio.wrap_future(self._database.read_long(runs.read_sizes))

    async def prune(self, before: float) -> int:
        return await self._write(self._in_run(runs.prune, before=before))

    async def drop(self) -> None:
        await self._write(self._in_run(runs.drop))

    async def vacuum(self) -> None:
        await asyncio.wrap_future(self._database.vacuum())

    async def export(self, file: Path) -> None:
        read = self._in_run(archive.export_run, file=file)
        await asyncio.wrap_future(self._database.read_long(read))

    async def load(self, file: Path) -> None:
        now = self._queue.clock()
        await self._write(self._in_run(archive.load_run, file=file, now=now))

    # ------------------------------------------------------------------ threads

    def _in_run(
        self, act: Callable[Concatenate[Db, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[Db], T]:
        """An act on this run, waiting for its connection."""
        return lambda db: act(db, self.run, *args, **kwargs)

    async def _write(self, change: Callable[[Db], T]) -> T:
        if self._ticket is not None:
            change = tickets.once(change, self.run, self._ticket, self._queue.clock())
        return await self._database.write(change)

    async def _write_in_bulk(
        self, act: Callable[[Db, str, Sequence[A]], Sequence[T | WhetError]], argument: A
    ) -> T:
        """For what may be done again without a ticket: it knows by itself that it was done."""
        return await self._database.write(Bulk(act, self.run, argument))

    async def _read(self, read: Callable[[Db], T], *, small: bool = False) -> T:
        return await self._database.read(read, small=small)

    async def _claim_now(self, worker: str, lease_s: float, wait_s: float) -> Attempt | None:
        claim = Claim(worker, lease_s, wait_s, self._ticket)
        future = self._database.write(Bulk(self._queue.claim, self.run, claim))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # The commit may be under way: a claim nobody hears of would block its rollout until
            # the lease ran out, and use up one of its attempts.
            future.add_done_callback(self._unclaim)
            raise

    def _unclaim(self, claimed: asyncio.Future[Attempt | None]) -> None:
        if claimed.cancelled() or claimed.exception() is not None:
            return
        attempt = claimed.result()
        if attempt is not None:
            with suppress(StoreError):  # closed meanwhile: the lease will run out
                undo = self._in_run(self._queue.unclaim, attempt=attempt.id, ticket=self._ticket)
                self._database.submit(undo)
