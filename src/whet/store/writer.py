"""The one thread that writes, with group commit.

While one commit waits for the disk, changes pile up; the next transaction takes them all, so
the cost of a durable commit is shared by everybody who waits for one.
"""

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple, TypeVar, cast

from whet.errors import StoreClosed, StoreError, WhetError, boundary
from whet.store.database import Bulk, Change, Db
from whet.store.jobs import Inbox, Job, Reply, deliver

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_NAP_S = 60.0
"""Upkeep is looked at this often at least: a suspended machine's timers stand still."""

MAX_TRIES = 10
"""How often a transaction is begun again that another process got in the way of."""


class _Work(NamedTuple):
    change: Change[Any]  # Any: changes of all results share one queue
    alone: bool


_Job = Job[_Work]


class _Refused(WhetError):
    """A change was refused, and may have left something in the transaction."""


def _guard() -> AbstractContextManager[None]:
    return boundary(StoreError, "store")


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
        guard: Callable[[], AbstractContextManager[None]] = _guard,
        transient: Callable[[BaseException | None], bool] = _never,
    ) -> None:
        """`upkeep` ends every transaction and says in how many seconds it is due again.

        `guard` names what goes wrong with the database as StoreError. A transaction that failed
        with a `transient` error is done once more: nothing of it was seen by anybody.
        """
        self._db = db
        self._upkeep = upkeep
        self._committed = committed
        self._guard = guard
        self._transient = transient
        self._nap_s: float | None = None
        self._inbox = Inbox[_Work]()
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
            self._db.close()

    def _work(self) -> None:
        more = True
        while more:
            jobs, more = self._inbox.take(self._nap_s)
            self._begun = [job for job in jobs if job.begin()]
            self._transact([job for job in self._begun if not job.work.alone])
            for job in self._begun:
                if job.work.alone:
                    self._run_alone(job)

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
                deliver((job, _again(error)) for job in jobs)
                return
            else:
                self._committed()
                deliver(replies)
                return

    def _undo(self) -> None:
        with suppress(StoreError), boundary(StoreError, "it was undone already"):
            self._db.execute("ROLLBACK")

    def _commit(self, jobs: Sequence[_Job], *, careful: bool) -> list[Reply]:
        """Do all in one transaction; only if `careful` can one be refused without the others."""
        replies: list[Reply] = []
        with self._guard():
            self._db.execute("BEGIN IMMEDIATE")
            if careful:
                replies = [(job, self._change_carefully(job)) for job in jobs]
            else:
                for kind in _by_kind(jobs):
                    replies += zip(kind, self._change(kind), strict=True)
            due_s = self._upkeep(self._db)
            self._db.execute("COMMIT")
        self._nap_s = None if due_s is None else min(max(due_s, 0.0), MAX_NAP_S)
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
