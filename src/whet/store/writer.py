"""The one who writes, with group commit.

What an event loop asks for, while each of its turns adds to it, is one transaction. It is done
right there as long as that is quick: to wake a thread, which then fights for the interpreter's
lock, costs more than most commits. Whatever may take longer is done by a thread: while one commit
waits for the disk, changes pile up, and the next transaction takes them all.
"""

import asyncio
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple, TypeVar, cast

from whet.errors import StoreClosed, StoreError, WhetError, boundary
from whet.store.database import Bulk, Change, Db, nothing
from whet.store.here import Here
from whet.store.jobs import Inbox, Job, Reply, deliver

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_NAP_S = 60.0
"""Upkeep is looked at this often at least: a suspended machine's timers stand still."""

MAX_TRIES = 10
"""How often a transaction is begun again that another process got in the way of."""

GATHER_S = 0.02
"""How long the changes of an event loop wait at most for others, which it is working on."""

FEW = 64
"""Changes that an event loop may commit itself."""


class _Work(NamedTuple):
    change: Change[Any]  # Any: changes of all results share one queue
    alone: bool


_Job = Job[_Work]


class _Refused(WhetError):
    """A change was refused, and may have left something in the transaction."""


class _Busy(WhetError):
    """Another process is writing, and nobody here may wait for it."""


def _guard() -> AbstractContextManager[None]:
    return boundary(StoreError, "store")


def _never(error: BaseException | None) -> bool:
    return False


def _begin(db: Db) -> None:
    db.execute("BEGIN IMMEDIATE")


class Writer:
    """Runs changes in the order they came, each wholly or not at all."""

    def __init__(
        self,
        db: Db,
        *,
        upkeep: Callable[[Db], float | None],
        committed: Callable[[], None],
        guard: Callable[[], AbstractContextManager[None]] = _guard,
        transient: Callable[[BaseException | None], bool] = _never,
        begin: Callable[[Db], None] = _begin,
        begin_now: Callable[[Db], bool] | None = None,
    ) -> None:
        """`upkeep` ends every transaction and says in how many seconds it is due again.

        `guard` names what goes wrong with the database as StoreError. A transaction that failed
        with a `transient` error is done once more: nothing of it was seen by anybody. `begin`
        waits for other processes. `begin_now` does not, and says whether it has begun; without
        it, the thread does everything.
        """
        self._db = db
        self._upkeep = upkeep
        self._committed = committed
        self._guard = guard
        self._transient = transient
        self._begin = begin
        self._begin_now = begin_now
        self._here = Here(allowed=begin_now is not None)
        self._due = math.inf
        """When upkeep is, on the monotonic clock."""
        self._sleeps_until = math.inf
        self._inbox = Inbox[_Work](self._do_here, gather_s=GATHER_S)
        self._begun: list[_Job] = []
        self._thread = threading.Thread(target=self._run, name="whet-store-writer", daemon=True)
        self._thread.start()

    def write(self, change: Change[T]) -> asyncio.Future[T]:
        """Have `change` committed; the future resolves once it is durable, or was undone.

        Cancelling the future stops a change that has not begun.
        """
        return self._inbox.ask(_Work(change, alone=False))

    def submit(self, change: Change[T], *, alone: bool = False) -> Future[T]:
        """The same from any thread. One that runs `alone` is in no transaction."""
        future = Future[T]()
        self._inbox.put(Job(_Work(change, alone), future))
        return future

    def close(self) -> None:
        """Commit what was submitted, and end the thread. Idempotent."""
        self._inbox.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            # However the thread ends, nobody waits for it in vain.
            stopped = StoreClosed("the store's writer has stopped")
            deliver((job, stopped) for job in self._begun)
            self._inbox.refuse(stopped)
            with self._here.in_use:
                self._here.forbid()
                self._db.close()

    def _work(self) -> None:
        more = True
        while more:
            jobs, more = self._inbox.take(self._nap_s())
            with self._here.in_use:
                self._begun = [job for job in jobs if job.begin()]
                self._transact([job for job in self._begun if not job.work.alone])
                for job in self._begun:
                    if job.work.alone:
                        self._run_alone(job)

    def _nap_s(self) -> float | None:
        """How long the thread may sleep, if there is nothing to do."""
        with self._here.in_use:
            self._sleeps_until = self._due
        left_s = self._sleeps_until - time.monotonic()
        return None if left_s == math.inf else min(max(left_s, 0.0), MAX_NAP_S)

    def _do_here(self, jobs: Sequence[_Job]) -> bool:
        """Commit small changes in the thread of the event loop that asks for them, if it may."""
        if len(jobs) > FEW or not all(isinstance(job.work.change, Bulk) for job in jobs):
            return False
        with self._here.turn() as may:
            if not may:
                return False
            try:
                self._transact([job for job in jobs if job.begin()], wait=False)
            except _Busy:
                return False
            except BaseException:
                self._undo()
                deliver((job, StoreError("the commit was interrupted")) for job in jobs)
                raise
            too_late = self._due < self._sleeps_until
        if too_late:
            with suppress(StoreClosed):
                self.submit(nothing)  # which wakes the thread
        return True

    def _transact(self, jobs: Sequence[_Job], *, wait: bool = True) -> None:
        tries, careful = 0, False
        while True:
            try:
                replies = self._commit(jobs, careful=careful, wait=wait)
            except _Refused:
                self._undo()
                careful = True
            except StoreError as error:
                self._undo()
                tries += 1
                if tries < MAX_TRIES and self._transient(error.__cause__):
                    continue
                logger.error("transaction failed changes=%d error=%s", len(jobs), error)
                self._due = time.monotonic() + MAX_NAP_S
                deliver((job, _again(error)) for job in jobs)
                return
            else:
                self._committed()
                deliver(replies)
                return

    def _undo(self) -> None:
        with suppress(StoreError), boundary(StoreError, "it was undone already"):
            self._db.execute("ROLLBACK")

    def _commit(self, jobs: Sequence[_Job], *, careful: bool, wait: bool) -> list[Reply]:
        """Do all in one transaction; only if `careful` can one be refused without the others."""
        replies: list[Reply] = []
        with self._guard():
            if wait or self._begin_now is None:
                self._begin(self._db)
            elif not self._begin_now(self._db):
                raise _Busy
            if careful:
                replies = [(job, self._change_carefully(job)) for job in jobs]
            else:
                for kind in _by_kind(jobs):
                    replies += zip(kind, self._change(kind), strict=True)
            due_s = self._upkeep(self._db)
            self._db.execute("COMMIT")
        self._due = math.inf if due_s is None else time.monotonic() + due_s
        return replies

    def _run_alone(self, job: _Job) -> None:
        try:
            with self._guard():
                [result] = self._do([job])
        except WhetError as error:
            result = error
        deliver([(job, result)])

    def _do(self, jobs: Sequence[_Job]) -> Sequence[Any]:
        """What came of changes of one kind."""
        change = jobs[0].work.change
        if not isinstance(change, Bulk):
            return [change(self._db)]
        bulk = cast(list[Bulk[Any, Any]], [job.work.change for job in jobs])
        return bulk[0].act(self._db, bulk[0].run, [one.argument for one in bulk])

    def _change(self, jobs: Sequence[_Job]) -> Sequence[Any]:
        """Change without a way back: refusals are rare, and savepoints are not free."""
        try:
            with self._guard():
                return self._do(jobs)
        except WhetError as error:
            if not self._db.in_transaction or self._transient(error.__cause__):
                raise StoreError(str(error)) from error.__cause__
            raise _Refused from error

    def _change_carefully(self, job: _Job) -> Any:
        """Run one change so that it can be undone by itself; a refusal is its result."""
        self._db.execute("SAVEPOINT change")
        try:
            with self._guard():
                [result] = self._do([job])
        except WhetError as error:
            # A full disk undoes the neighbours too, and so does whoever got in the way.
            if not self._db.in_transaction or self._transient(error.__cause__):
                raise StoreError(str(error)) from error.__cause__
            self._db.execute("ROLLBACK TO change")
            result = error
        self._db.execute("RELEASE change")
        return result


def _again(error: StoreError) -> StoreError:
    """The same error for one more: whoever raises it adds its own traceback."""
    again = StoreError(str(error))
    again.__cause__ = error.__cause__
    return again


def _by_kind(jobs: Sequence[_Job]) -> Iterable[list[_Job]]:
    """Bulk changes of one kind together, where the first of them stood.

    Whoever waits for one change before the next never sees that the order is another.
    """
    kinds = defaultdict[object, list[_Job]](list)
    for place, job in enumerate(jobs):
        change = job.work.change
        kinds[(change.act, change.run) if isinstance(change, Bulk) else place].append(job)
    return kinds.values()
