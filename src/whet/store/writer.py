"""The one thread that writes, with group commit.

While one commit waits for the disk, changes pile up; the next transaction takes them all, so
the cost of a durable commit is shared by everybody who waits for one.
"""

import logging
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from whet.errors import StoreError, WhetError, boundary

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_NAP_S = 60.0
"""Upkeep is looked at this often at least: a suspended machine's timers stand still."""


class _Job(NamedTuple):
    change: Callable[[sqlite3.Connection], Any]  # Any: jobs of all results share one queue
    future: Future[Any]


class Writer:
    """Runs changes in the order they came, each wholly or not at all."""

    def __init__(
        self,
        db: sqlite3.Connection,
        *,
        upkeep: Callable[[sqlite3.Connection], float | None],
        committed: Callable[[], None],
    ) -> None:
        """`upkeep` ends every transaction and says in how many seconds it is due again."""
        self._db = db
        self._upkeep = upkeep
        self._committed = committed
        self._nap_s: float | None = None
        self._jobs = SimpleQueue[_Job | None]()
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="whet-store-writer", daemon=True)
        self._thread.start()

    def submit(self, change: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Have `change` committed; the future resolves once it is durable, or was undone.

        Cancelling the future stops a change that has not begun.
        """
        future = Future[T]()
        with self._closing:
            if self._closed:
                raise StoreError("the store is closed")
            self._jobs.put(_Job(change, future))
        return future

    def close(self) -> None:
        """Commit what was submitted, and end the thread. Idempotent."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        more = True
        while more:
            jobs = self._take()
            more = None not in jobs
            self._transact(
                [job for job in jobs if job and job.future.set_running_or_notify_cancel()]
            )
        self._db.close()

    def _take(self) -> list[_Job | None]:
        """All that is waiting; empty when upkeep is due instead."""
        try:
            jobs = [self._jobs.get(timeout=self._nap_s)]
        except Empty:
            return []
        with suppress(Empty):
            for _ in range(self._jobs.qsize()):
                jobs.append(self._jobs.get_nowait())
        return jobs

    def _transact(self, jobs: Sequence[_Job]) -> None:
        try:
            with boundary(StoreError, "store"):
                self._db.execute("BEGIN IMMEDIATE")
                replies = [self._change(job) for job in jobs]
                due_s = self._upkeep(self._db)
                self._db.execute("COMMIT")
        except StoreError as error:
            with suppress(sqlite3.Error):  # it may have been rolled back already
                self._db.execute("ROLLBACK")
            logger.error("transaction failed changes=%d error=%s", len(jobs), error)
            self._nap_s = MAX_NAP_S
            for job in jobs:
                job.future.set_exception(StoreError(str(error)))
            return
        self._nap_s = None if due_s is None else min(max(due_s, 0.0), MAX_NAP_S)
        self._committed()
        for reply in replies:
            reply()

    def _change(self, job: _Job) -> Callable[[], None]:
        """Run one change; what it answers is given only after the commit."""
        self._db.execute("SAVEPOINT change")
        try:
            with boundary(StoreError, "store"):
                result = job.change(self._db)
        except WhetError as error:
            if not self._db.in_transaction:  # a full disk undoes the neighbours too
                raise StoreError(str(error)) from error
            self._db.execute("ROLLBACK TO change")
            reply = partial(job.future.set_exception, error)
        else:
            reply = partial(job.future.set_result, result)
        self._db.execute("RELEASE change")
        return reply
