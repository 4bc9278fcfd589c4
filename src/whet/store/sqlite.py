"""The store in one SQLite file, for everything that runs on one machine."""

import asyncio
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import anyio
from anyio import to_thread

from whet.errors import LeaseLost, StoreError, boundary
from whet.protocols import AttemptLog, RolloutQueue, StepLog
from whet.store import log, steps
from whet.store.bell import Bell
from whet.store.packing import to_json
from whet.store.queue import Queue, unfinished
from whet.store.schema import connect, open_file
from whet.store.writer import Writer
from whet.types import (
    Attempt,
    AttemptId,
    Call,
    Mode,
    Outcome,
    Reward,
    Rollout,
    StepRecord,
    Trajectory,
)

T = TypeVar("T")


class SQLiteStore(RolloutQueue, AttemptLog, StepLog):
    """A store on one file, usable from several event loops and threads at once.

    A write is on disk when its method returns, and every read begun after that sees it.
    Processes may share the file, but are woken only by what happens in their own.
    """

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        """Raises StoreError if the file cannot be opened or made."""
        path = Path(path)
        writes = open_file(path)
        self._reads = connect(path)
        self._reads.execute("PRAGMA query_only = ON")
        self._work = Bell()
        self._ended = Bell()
        self._queue = Queue(clock, work=self._work, ended=self._ended)
        self._writer = Writer(writes, upkeep=self._queue.upkeep, committed=self._ring_if_marked)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="whet-store-reader")

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
        """Commit what was begun and close the file; whoever still waits gets StoreError."""
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(self._shut)

    # ------------------------------------------------------------------ the queue

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        with boundary(StoreError, "rollouts cannot be stored"):
            rows = [(rollout.id, to_json(rollout), rollout.max_attempts) for rollout in rollouts]
        await self._write(partial(self._queue.enqueue, rows=rows))

    async def claim(self, worker: str, *, lease_s: float, wait_s: float) -> Attempt | None:
        deadline = anyio.current_time() + wait_s
        with self._work.listening() as rung:
            while True:
                rung.clear()
                attempt = await self._claim_now(worker, lease_s)
                left_s = deadline - anyio.current_time()
                if attempt is not None or left_s <= 0:
                    return attempt
                with anyio.move_on_after(left_s):
                    await rung.wait()

    async def heartbeat(self, attempt: AttemptId, *, lease_s: float) -> None:
        await self._write(partial(self._queue.heartbeat, attempt=attempt, lease_s=lease_s))

    async def finish(self, attempt: AttemptId, outcome: Outcome) -> None:
        try:
            await self._write(partial(self._queue.finish, attempt=attempt, outcome=outcome))
        except LeaseLost:
            await self._write(partial(self._queue.keep_late, attempt=attempt, outcome=outcome))
            raise

    async def wait(self, rollouts: Sequence[str]) -> None:
        with self._ended.listening() as rung:
            await self._write(_nothing)  # upkeep: leases may have run out since the last write
            pending = list(rollouts)
            while True:
                rung.clear()
                pending = await self._read(partial(unfinished, rollouts=pending))
                if not pending:
                    return
                await rung.wait()

    async def release_workers(self) -> int:
        """Take every running attempt from its worker, and say how many there were.

        For a process that has the run to itself and starts it again: none of the workers can be
        alive, so none has to be waited for. The rollouts are queued again, and what was lost
        does not count towards their `max_attempts`: a restart loses no rollout.
        """
        return await self._write(self._queue.release)

    # ------------------------------------------------------------------ the log

    async def attempt(self, attempt: AttemptId) -> Attempt:
        return await self._read(partial(log.read_attempt, attempt=attempt))

    async def append(self, call: Call) -> None:
        await self._write(partial(log.append, call=log.pack_call(call)))

    async def emit(self, attempt: AttemptId, reward: Reward) -> None:
        await self._write(partial(log.emit, attempt=attempt, reward=reward))

    async def calls(self, attempt: AttemptId) -> list[Call]:
        return await self._read(partial(log.read_calls, attempt=attempt))

    async def trajectories(self, rollouts: Sequence[str]) -> list[Trajectory]:
        return await self._read(partial(log.read_trajectories, rollouts=rollouts))

    async def failures(self, rollouts: Sequence[str]) -> dict[str, str]:
        return await self._read(partial(log.read_failures, rollouts=rollouts))

    async def counts(self) -> dict[str, int]:
        """How many rollouts, attempts, calls, generations and sampled tokens there are."""
        return await self._read(log.read_counts)

    async def rollout_ids(self, mode: Mode) -> list[str]:
        """The rollouts of a mode, in the order they came."""
        return await self._read(partial(log.read_rollout_ids, mode=mode))

    # ------------------------------------------------------------------ the steps

    async def commit(self, record: StepRecord) -> None:
        await self._write(partial(steps.commit, record=record))

    async def steps(self) -> list[StepRecord]:
        return await self._read(steps.read_steps)

    # ------------------------------------------------------------------ threads

    async def _write(self, change: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.wrap_future(self._writer.submit(change))

    async def _read(self, read: Callable[[sqlite3.Connection], T]) -> T:
        try:
            future = self._reader.submit(self._snapshot, read)
        except RuntimeError as error:
            raise StoreError("the store is closed") from error
        return await asyncio.wrap_future(future)

    def _snapshot(self, read: Callable[[sqlite3.Connection], T]) -> T:
        with boundary(StoreError, "store"):
            self._reads.execute("BEGIN")
            try:
                return read(self._reads)
            finally:
                self._reads.execute("ROLLBACK")

    async def _claim_now(self, worker: str, lease_s: float) -> Attempt | None:
        future = self._writer.submit(partial(self._queue.claim, worker=worker, lease_s=lease_s))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            # The commit may be under way: a claim nobody hears of would block its rollout until
            # the lease ran out, and use up one of its attempts.
            future.add_done_callback(self._unclaim)
            raise

    def _unclaim(self, claimed: Future[Attempt | None]) -> None:
        if claimed.cancelled() or claimed.exception() is not None:
            return
        attempt = claimed.result()
        if attempt is not None:
            with suppress(StoreError):  # closed meanwhile: the lease will run out
                self._writer.submit(partial(self._queue.unclaim, attempt=attempt.id))

    def _ring_if_marked(self) -> None:
        self._work.ring_if_marked()
        self._ended.ring_if_marked()

    def _shut(self) -> None:
        self._writer.close()
        self._reader.shutdown()
        self._reads.close()
        self._work.ring()
        self._ended.ring()


def _nothing(db: sqlite3.Connection) -> None:
    """Change nothing; the transaction around it does upkeep."""
