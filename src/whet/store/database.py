"""What the store's logic asks of a database: few things, so that two databases can share it.

The SQL of this package is written once, in SQLite's words; `postgres.py` lists the differences.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

from whet.errors import WhetError
from whet.store.bell import Bell

A = TypeVar("A")
T = TypeVar("T")
Column = str | int | float | bytes | None
Values = Sequence[Column] | Mapping[str, Column]

MAX_ROWS = 64


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


@dataclass(frozen=True, slots=True)
class Bulk(Generic[A, T]):
    """A change to a run that is done in one go with all others of its kind that wait."""

    act: Callable[[Db, str, Sequence[A]], Sequence[T | WhetError]]
    """Does it for several arguments, and says for each what came of it: an error where one was
    refused, of which nothing is left. If it raises, each is tried for itself."""
    run: str
    argument: A


Change = Callable[[Db], T] | Bulk[Any, T]  # Any: the argument is the act's own affair


def nothing(db: Db) -> None:
    """Change nothing; the transaction around it does upkeep."""


class Database(Protocol):
    """Runs the store's logic: changes one after the other in group commits, reads beside them."""

    bell: Bell
    """Rung after every commit with what it changed, whoever made it."""

    def write(self, change: Change[T]) -> asyncio.Future[T]:
        """Have a change committed: durable once awaited in the running event loop, or undone."""
        ...

    def submit(self, change: Change[T]) -> Future[T]:
        """The same from any thread."""
        ...

    def read(self, read: Callable[[Db], T], *, small: bool = False) -> asyncio.Future[T]:
        """Read from a snapshot that has everything whose write has returned.

        What is `small` may be read in the thread that asks.
        """
        ...

    def read_long(self, read: Callable[[Db], T]) -> Future[T]:
        """The same beside all other reads, for what takes long, and from any thread."""
        ...

    def vacuum(self) -> Future[None]:
        """Give unused space back to the disk."""
        ...

    def close(self) -> None:
        """Commit what was begun; whoever still waits gets StoreError. Idempotent."""
        ...


@lru_cache(256)
def for_rows(sql: str, rows: int) -> str:
    """An INSERT of one row as one of several."""
    return re.sub(
        r"VALUES (\([^)]*\))", lambda one: "VALUES " + ", ".join([one[1]] * rows), sql, count=1
    )


def insert(db: Db, sql: str, rows: Sequence[tuple[Column, ...]]) -> list[Any]:  # Any: see Rows
    """Insert in few statements, and return what they return.

    They insert 1, 2, 4 ... rows each, so that few different ones have to be prepared.
    """
    returned: list[Any] = []
    first = 0
    while first < len(rows):
        count = min(MAX_ROWS, 1 << (len(rows) - first).bit_length() - 1)
        values = list(chain.from_iterable(rows[first : first + count]))
        done = db.execute(for_rows(sql, count), values)
        if "RETURNING" in sql:
            returned += done.fetchall()
        first += count
    return returned
