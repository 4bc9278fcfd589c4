"""The one thread that reads: whoever asks at the same time reads from one snapshot."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from whet.errors import StoreClosed, WhetError
from whet.store.database import Db
from whet.store.jobs import Inbox, deliver

T = TypeVar("T")


class Reader:
    """Reads in the order they came, each from a snapshot that was taken after it was asked for."""

    def __init__(self, db: Db, guard: Callable[[], AbstractContextManager[None]]) -> None:
        """`guard` names what goes wrong with the database as StoreError."""
        self._db = db
        self._guard = guard
        self._inbox = Inbox[Callable[[Db], Any]]()  # Any: reads of all results share one queue
        self._thread = threading.Thread(target=self._run, name="whet-store-reader", daemon=True)
        self._thread.start()

    def read(self, read: Callable[[Db], T]) -> asyncio.Future[T]:
        """What it reads, in the running event loop. Raises StoreClosed."""
        return self._inbox.ask(read)

    def close(self) -> None:
        """Read what was asked for, and end the thread. Idempotent."""
        self._inbox.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            more = True
            while more:
                jobs, more = self._inbox.take()
                begun = [job for job in jobs if job.begin()]
                deliver(zip(begun, self._snapshot([job.work for job in begun]), strict=True))
        finally:
            self._inbox.refuse(StoreClosed("the store's reader has stopped"))
            self._db.close()

    def _snapshot(self, reads: list[Callable[[Db], Any]]) -> list[Any]:
        """What each of them gives, or its error."""
        try:
            with self._guard():
                self._db.execute("BEGIN")
            results = [self._result(read) for read in reads]
            if self._db.in_transaction:  # a broken disk has ended it
                with self._guard():
                    self._db.execute("ROLLBACK")
        except WhetError as error:
            return [error for _ in reads]
        return results

    def _result(self, read: Callable[[Db], Any]) -> Any:
        try:
            with self._guard():
                return read(self._db)
        except WhetError as error:
            return error
