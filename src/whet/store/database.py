"""What the store's logic asks of a database: few things, so that two databases can share it.

The SQL of this package is written once, in SQLite's words; `postgres.py` lists the differences.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from whet.store.bell import Bell

T = TypeVar("T")
Column = str | int | float | bytes | None
Values = Sequence[Column] | Mapping[str, Column]


class Rows(Protocol):
    """What a statement gave. A row is a tuple of columns, whose types the statement knows."""

    def __iter__(self) -> Iterator[Any]: ...  # Any: columns have the types of their tables
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...


class Db(Protocol):
    """A connection, inside a transaction that somebody else begins and ends."""

    @property
    def in_transaction(self) -> bool: ...
    def execute(self, sql: str, values: Values = (), /) -> Rows: ...
    def executemany(self, sql: str, values: Iterable[Sequence[Column]], /) -> object: ...
    def close(self) -> None: ...


class Database(Protocol):
    """Runs the store's logic: changes by one thread with group commit, reads beside it."""

    bell: Bell
    """Rung after every commit with what it changed, whoever made it."""

    def write(self, change: Callable[[Db], T]) -> Future[T]:
        """Have a change committed; the future resolves once it is durable, or was undone."""
        ...

    def read(self, read: Callable[[Db], T]) -> Future[T]:
        """Read from a snapshot that has everything whose write has returned."""
        ...

    def read_long(self, read: Callable[[Db], T]) -> Future[T]:
        """The same beside all other reads, for what takes long."""
        ...

    def vacuum(self) -> Future[None]:
        """Give unused space back to the disk."""
        ...

    def close(self) -> None:
        """Commit what was begun; whoever still waits gets StoreError. Idempotent."""
        ...
