"""The one who reads: whoever asks at the same time reads from one snapshot.

What is small is read right where it is asked for, as long as that is quick, the rest by a thread.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

from whet.errors import StoreClosed, WhetError
from whet.store.database import Db
from whet.store.here import Here
from whet.store.jobs import Inbox, Job, deliver

T = TypeVar("T")


class _Read(NamedTuple):
    read: Callable[[Db], Any]  # Any: reads of all results share one queue
    small: bool


_Job = Job[_Read]


class Reader:
    """Reads in the order they came, each from a snapshot that was taken after it was asked for."""

    def __init__(self, db: Db, guard: Callable[[], AbstractContextManager[None]]) -> None:
        """`guard` names what goes wrong with the database as StoreError."""
        self._db = db
        self._guard = guard
        self._here = Here()
        self._inbox = Inbox[_Read](self._do_here)
        self._thread = threading.Thread(target=self._run, name="whet-store-reader", daemon=True)
        self._thread.start()

    def read(self, read: Callable[[Db], T], *, small: bool) -> asyncio.Future[T]:
        """What it reads, in the running event loop. Raises StoreClosed."""
        return self._inbox.ask(_Read(read, small))

    def close(self) -> None:
        """Read what was asked for, and end the thread. Idempotent."""
        self._inbox.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            more = True
            while more:
                jobs, more = self._inbox.take()
                with self._here.in_use:
                    self._answer(jobs)
        finally:
            self._inbox.refuse(StoreClosed("the store's reader has stopped"))
            with self._here.in_use:
                self._here.forbid()
                self._db.close()

    def _do_here(self, jobs: Sequence[_Job]) -> bool:
        """Read what is small in the thread of the event loop that asks for it, if it may."""
        if not all(job.work.small for job in jobs):
            return False
        with self._here.turn() as may:
            if may:
                self._answer(jobs)
        return may

    def _answer(self, jobs: Sequence[_Job]) -> None:
        begun = [job for job in jobs if job.begin()]
        deliver(zip(begun, self._snapshot([job.work.read for job in begun]), strict=True))

    def _snapshot(self, reads: Sequence[Callable[[Db], Any]]) -> list[Any]:
        """What each of them gives, or its error."""
        try:
            with self._guard():
                self._db.execute("BEGIN")
            try:
                return [self._result(read) for read in reads]
            finally:
                if self._db.in_transaction:  # else a broken disk has ended it
                    with self._guard():
                        self._db.execute("ROLLBACK")
        except WhetError as error:
            return [error for _ in reads]

    def _result(self, read: Callable[[Db], Any]) -> Any:
        try:
            with self._guard():
                return read(self._db)
        except WhetError as error:
            return error
