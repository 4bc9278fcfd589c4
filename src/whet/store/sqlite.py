"""The store in one SQLite file, for everything that runs on one machine."""

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from whet.errors import StoreClosed
from whet.store.bell import Bell
from whet.store.database import Change, Database, Db
from whet.store.failures import named
from whet.store.queue import Queue
from whet.store.reader import Reader
from whet.store.schema import PATIENCE_S, connect, open_file
from whet.store.sql import DEFAULT_RUN, SQLStore
from whet.store.writer import Writer

T = TypeVar("T")

LOOK_S = 0.001
"""How often another process that writes is looked at: SQLite itself would soon do so ten times a
second only."""


class SQLiteDatabase(Database):
    """A file with one connection that writes and one that reads."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """Raises StoreError if the file cannot be opened or made."""
        self._path = path
        writes, reads = open_file(path), _reading(path)
        _wait_at_most(writes, 0)
        self.bell = Bell()
        self.queue = Queue(clock, self.bell)
        self._writer = Writer(
            writes,
            upkeep=self.queue.upkeep,
            committed=self.bell.ring_marked,
            guard=lambda: named(path),
            begin=_begin,
            begin_now=_begin_now,
        )
        self._reader = Reader(reads, lambda: named(path))
        self._long = ThreadPoolExecutor(1, thread_name_prefix="whet-store-long-reader")

    def write(self, change: Change[T]) -> asyncio.Future[T]:
        return self._writer.write(change)

    def submit(self, change: Change[T]) -> Future[T]:
        return self._writer.submit(change)

    def read(self, read: Callable[[Db], T], *, small: bool = False) -> asyncio.Future[T]:
        return self._reader.read(read, small=small)

    def read_long(self, read: Callable[[Db], T]) -> Future[T]:
        def beside() -> T:
            with named(self._path), closing(_reading(self._path)) as db:
                db.execute("BEGIN")
                return read(db)

        try:
            return self._long.submit(beside)
        except RuntimeError as error:
            raise StoreClosed("the store is closed") from error

    def vacuum(self) -> Future[None]:
        return self._writer.submit(_vacuum, alone=True)

    def close(self) -> None:
        self._writer.close()
        self._reader.close()
        self._long.shutdown()
        self.bell.ring()


class SQLiteStore(SQLStore):
    """A run in one file.

    Processes may share the file, but are woken only by what happens in their own.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        run: str = DEFAULT_RUN,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises StoreError if the file cannot be opened or made."""
        database = SQLiteDatabase(Path(path), clock)
        super().__init__(database, database.queue, run)


def _reading(path: Path) -> sqlite3.Connection:
    db = connect(path)
    db.execute("PRAGMA query_only = ON")
    return db


def _begin_now(db: Db) -> bool:
    try:
        db.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:  # whatever it is busy with
            return False
        raise
    return True


def _begin(db: Db) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if _begin_now(db):
            return
        time.sleep(LOOK_S)
    db.execute("BEGIN IMMEDIATE")


def _vacuum(db: Db) -> None:
    _wait_at_most(db, PATIENCE_S)
    try:
        db.execute("VACUUM")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        _wait_at_most(db, 0)


def _wait_at_most(db: Db, seconds: float) -> None:
    db.execute(f"PRAGMA busy_timeout = {seconds * 1000:.0f}")
