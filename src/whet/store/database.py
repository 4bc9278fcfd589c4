"""The interface between the store's SQL and a database: SQLite and PostgreSQL implement it.

The SQL of this package is written once, in SQLite's dialect; `postgres.py` lists the differences.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from whet.errors import WhetError
from whet.store.notify import Notifier

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
