"""The one thread that writes, with group commit.

While one commit waits for the disk, changes pile up; the next transaction takes them all, so
the cost of a durable commit is shared by everybody who waits for one.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from whet.errors import StoreError, WhetError, boundary
from whet.store.database import Db

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_NAP_S = 60.0
"""Upkeep is looked at this often at least: a suspended machine's timers stand still."""

MAX_TRIES = 10
"""How often a transaction is begun again that another process got in the way of."""


class _Job(NamedTuple):
    change: Callable[[Db], Any]  # Any: jobs of all results share one queue
    future: Future[Any]
    alone: bool


class _Refused(WhetError):
    """A change was refused, and may have left something in the transaction."""


def _never(error: BaseException | None) -> bool:
    return False


class Writer:
    """Runs changes in the order they came, each wholly or not at all."""

    def __init__(
        self,
        db: Db,
        *,
        upkeep: Callable[[Db], float | None],
        committed: Callable[[], None],
        transient: Callable[[BaseException | None], bool] = _never,
    ) -> None:
        """`upkeep` ends every transaction and says in how many seconds it is due again.

        A transaction that failed with a `transient` error is done once more: nothing of it was
        seen by anybody.
        """
        self._db = db
        self._upkeep = upkeep
        self._committed = committed
        self._transient = transient
        self._nap_s: float | None = None
        self._jobs = SimpleQueue[_Job | None]()
        self._begun: list[_Job] = []
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="whet-store-writer", daemon=True)
        self._thread.start()

    def submit(self, change: Callable[[Db], T], *, alone: bool = False) -> Future[T]:
        """Have `change` committed; the future resolves once it is durable, or was undone.

        Cancelling the future stops a change that has not begun. One that runs `alone` is in no
        transaction.
        """
        future = Future[T]()
        with self._closing:
            if self._closed:
                raise StoreError("the store is closed")
            self._jobs.put(_Job(change, future, alone))
        return future

    def close(self) -> None:
        """Commit what was submitted, and end the thread. Idempotent."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            # However the thread ends, nobody waits for it in vain.
            with self._closing:
                self._closed = True
            for job in [*self._begun, *self._take_now()]:
                if job is not None and not job.future.done():
                    job.future.set_exception(StoreError("the store's writer has stopped"))
            self._db.close()

    def _work(self) -> None:
        more = True
        while more:
            jobs = self._take()
            more = None not in jobs
            self._begun = [j for j in jobs if j and j.future.set_running_or_notify_cancel()]
            self._transact([job for job in self._begun if not job.alone])
            for job in self._begun:
                if job.alone:
                    self._run_alone(job)

    def _take(self) -> list[_Job | None]:
        """All that is waiting; empty when upkeep is due instead."""
        try:
            jobs = [self._jobs.get(timeout=self._nap_s)]
        except Empty:
            return []
        return [*jobs, *self._take_now()]

    def _take_now(self) -> list[_Job | None]:
        jobs: list[_Job | None] = []
        with suppress(Empty):
            for _ in range(self._jobs.qsize()):
                jobs.append(self._jobs.get_nowait())
        return jobs

    def _transact(self, jobs: Sequence[_Job]) -> None:
        tries, careful = 0, False
        while True:
            try:
                replies = self._commit(jobs, careful=careful)
            except _Refused:
                self._undo()
                careful = True
            except StoreError as error:
                self._undo()
                tries += 1
                if tries < MAX_TRIES and self._transient(error.__cause__):
                    continue
                logger.error("transaction failed changes=%d error=%s", len(jobs), error)
                self._nap_s = MAX_NAP_S
                for job in jobs:
                    job.future.set_exception(StoreError(str(error)))
                return
            else:
                self._committed()
                for reply in replies:
                    reply()
                return

    def _undo(self) -> None:
        with suppress(StoreError), boundary(StoreError, "it was undone already"):
            self._db.execute("ROLLBACK")

    def _commit(self, jobs: Sequence[_Job], *, careful: bool) -> list[Callable[[], None]]:
        """Do all in one transaction; only if `careful` can one be refused without the others."""
        change = self._change if careful else self._change_boldly
        with boundary(StoreError, "store"):
            self._db.execute("BEGIN IMMEDIATE")
            replies = [change(job) for job in jobs]
            due_s = self._upkeep(self._db)
            self._db.execute("COMMIT")
        self._nap_s = None if due_s is None else min(max(due_s, 0.0), MAX_NAP_S)
        return replies

    def _run_alone(self, job: _Job) -> None:
        try:
            with boundary(StoreError, "store"):
                result = job.change(self._db)
        except WhetError as error:
            job.future.set_exception(error)
        else:
            job.future.set_result(result)

    def _change_boldly(self, job: _Job) -> Callable[[], None]:
        """Run one change without a way back: refusals are rare, and savepoints are not free."""
        try:
            with boundary(StoreError, "store"):
                return partial(job.future.set_result, job.change(self._db))
        except WhetError as error:
            if not self._db.in_transaction or self._transient(error.__cause__):
                raise StoreError(str(error)) from error.__cause__
            raise _Refused from error

    def _change(self, job: _Job) -> Callable[[], None]:
        """Run one change; what it answers is given only after the commit."""
        self._db.execute("SAVEPOINT change")
        try:
            with boundary(StoreError, "store"):
                result = job.change(self._db)
        except WhetError as error:
            # A full disk undoes the neighbours too, and so does whoever got in the way.
            if not self._db.in_transaction or self._transient(error.__cause__):
                raise StoreError(str(error)) from error.__cause__
            self._db.execute("ROLLBACK TO change")
            reply = partial(job.future.set_exception, error)
        else:
            reply = partial(job.future.set_result, result)
        self._db.execute("RELEASE change")
        return reply
