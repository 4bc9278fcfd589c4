"""The interface between the store's SQL and a database: SQLite and PostgreSQL implement it.

The SQL of this package is written once, in SQLite's dialect; `postgres.py` lists the differences.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from whet.errors import StoreClosed, WhetError
from whet.io.threads import resolve_all
from whet.store.notify import Notifier

K = TypeVar("K")
T = TypeVar("T")
Column = str | int | float | bytes | None
Values = Sequence[Column] | Mapping[str, Column]


class Cursor(Protocol):
    """Result rows of a statement. A row is a tuple of columns, whose types the statement knows."""

    def __iter__(self) -> Iterator[Any]: ...  # Any: columns have the types of their tables
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...


class Db(Protocol):
    """A connection, inside a transaction that its caller begins and ends."""

    @property
    def in_transaction(self) -> bool: ...
    def execute(self, sql: str, values: Values = (), /) -> Cursor: ...
    def executemany(self, sql: str, values: Iterable[Sequence[Column]], /) -> object: ...
    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class WorkItem(Generic[T]):
    """A change to the database, waiting for the writer, and the future of its caller."""

    apply: Callable[[Db, Sequence[Any]], Sequence[T | WhetError]]  # Any: the items' arguments
    """Applies the changes of a batch of items: takes the argument of each, returns its result, or
    an error for one that was refused and left nothing. If it raises, each item is applied alone."""
    argument: Any = None
    kind: object = None
    """Waiting items of an equal kind are applied as one batch; None is a batch of its own."""
    in_transaction: bool = True
    future: asyncio.Future[T] | None = None
    """Of the caller's event loop; None if no caller waits."""


class Database(Protocol):
    """Runs the store's SQL: changes one after the other in group commits, reads beside them.

    Every method may be called from any thread.
    """

    notifier: Notifier
    """Notifies of every committed change, by this process or another."""
    vacuum: Sequence[str]
    """Statements that return unused space to the disk, outside of a transaction."""

    def submit(self, item: WorkItem[Any]) -> None:
        """Queue a change; its future resolves once it is durable, or undone. Raises StoreClosed."""
        ...

    def read(self, read: Callable[[Db], T]) -> Future[T]:
        """Read from a snapshot that includes every change whose future has been resolved.

        Raises:
            RuntimeError: the database is closed, and with it the executor that reads.
        """
        ...

    def read_long(self, read: Callable[[Db], T]) -> Future[T]:
        """Read as `read` does, without delaying other reads."""
        ...

    def close(self) -> None:
        """Commit what was submitted and release the connections. Idempotent."""
        ...


def no_change() -> WorkItem[None]:
    """Make an item that changes nothing; the transaction around it expires leases."""
    return WorkItem(lambda db, _: [None])


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
