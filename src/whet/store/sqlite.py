"""The store in one SQLite file, for everything that runs on one machine."""

import fcntl
import sqlite3
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from whet.errors import StoreError, boundary
from whet.store import DEFAULT_RUN
from whet.store.database import Database, Db, WorkItem
from whet.store.group_commit import Writer
from whet.store.notify import Notifier
from whet.store.queries.queue import Queue
from whet.store.schema import TABLES, VERSION, check_version
from whet.store.sql_store import SQLStore

T = TypeVar("T")

PAGE_BYTES = 8192
"""Of a new file. A call with its generation is about ten thousand bytes: in SQLite's pages of 4096
it lies in chains of pages, each of which is written, summed and copied back by itself."""

LOCK_TIMEOUT_S = 30.0
"""How long to wait for another process that has the file locked."""

ADVICE = {
    "SQLITE_FULL": "nothing of the change was kept",
    "SQLITE_IOERR": "nothing of the change was kept; check its disk, then continue",
    "SQLITE_READONLY": "let this user write the file and its folder",
    "SQLITE_CANTOPEN": "its folder must exist, and this user must be able to write both",
    "SQLITE_BUSY": "another process keeps it locked: wait for that process, or stop it",
    "SQLITE_CORRUPT": "keep a copy, and save what can be read: sqlite3 FILE .recover | sqlite3 NEW",
    "SQLITE_NOTADB": "it is not a store, or its header is damaged: give the path of another file",
}
"""What to do about an error, by the prefix of its name."""


class SQLiteDatabase(Database):
    """A file with a thread that writes, one that reads, and one for long reads."""

    vacuum = ("VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)")

    def __init__(
        self, path: Path, clock: Callable[[], float], *, expires_leases: bool = True
    ) -> None:
        """Open the file, or create it. Raises StoreError."""
        self._path = path
        writes = _open(path)
        self._turn = _WriteTurn(path)
        self._reads = _connect_read_only(path)
        self.notifier = Notifier()
        self.queue = Queue(clock, self.notifier)
        self._writer = Writer(
            writes,
            self.notifier,
            expire_leases=self.queue.expire_leases if expires_leases else lambda db: None,
            errors=partial(wrap_sqlite_errors, path),
            turn=self._turn,
        )
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="whet-store-reader")
        self._long_reader = ThreadPoolExecutor(1, thread_name_prefix="whet-store-long-reader")

    def submit(self, item: WorkItem[Any]) -> None:
        self._writer.submit(item)

    def read(self, read: Callable[[Db], T]) -> Future[T]:
        return self._reader.submit(self._read_snapshot, self._reads, read)

    def read_long(self, read: Callable[[Db], T]) -> Future[T]:
        def read_beside() -> T:
            with wrap_sqlite_errors(self._path), closing(_connect_read_only(self._path)) as db:
                return self._read_snapshot(db, read)

        return self._long_reader.submit(read_beside)

    def close(self) -> None:
        self._writer.close()
        self._turn.close()
        self._reader.shutdown()
        self._long_reader.shutdown()
        self._reads.close()
        self.notifier.notify()

    def _read_snapshot(self, db: sqlite3.Connection, read: Callable[[Db], T]) -> T:
        with wrap_sqlite_errors(self._path):
            db.execute("BEGIN")
            try:
                return read(db)
            finally:
                if db.in_transaction:  # else an I/O error has ended it
                    db.execute("ROLLBACK")


class _WriteTurn:
    """A lock that the processes with this file take before a transaction, in turns.

    SQLite itself looks for its lock again after a pause, up to 100 ms after it was free. The lock
    is of a file of its own: closing the database's would release SQLite's locks on it.
    """

    def __init__(self, path: Path) -> None:
        with wrap_sqlite_errors(path, "cannot open the store"):
            # "wb" would truncate it: a run that is only read would look as if it had changed.
            self._file = path.with_name(f"{path.name}-turn").open("ab")

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *exc_info: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        self._file.close()


class SQLiteStore(SQLStore):
    """A run in one file.

    Processes may share the file, but each is notified only of its own changes.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        run: str = DEFAULT_RUN,
        clock: Callable[[], float] = time.time,
        expires_leases: bool = True,
    ) -> None:
        """Open the file, or create it. Raises StoreError.

        Without `expires_leases` another process does it, whose waiters would not be notified
        otherwise.
        """
        database = SQLiteDatabase(Path(path), clock, expires_leases=expires_leases)
        super().__init__(database, database.queue, run)


@contextmanager
def wrap_sqlite_errors(path: Path, what: str = "store") -> Generator[None]:
    """Raise the errors of a file as StoreError, in one line that says what to do."""
    try:
        with boundary(StoreError, what):
            yield
    except StoreError as error:
        cause = error.__cause__
        if isinstance(cause, sqlite3.Error):
            raise StoreError(f"{what} {str(path)!r}: {_explain(cause)}") from cause
        raise


def _explain(error: sqlite3.Error) -> str:
    # Errors of Python's module, such as the use of a closed connection, have no name.
    name: str = getattr(error, "sqlite_errorname", "")
    advice = [text for prefix, text in ADVICE.items() if name.startswith(prefix)]
    return "; ".join([str(error), *advice])


def check_file(path: Path) -> None:
    """Raise StoreError for a store that another version of whet wrote."""
    with wrap_sqlite_errors(path, "cannot open the store"), closing(_connect_read_only(path)) as db:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version:  # 0: a kill left it without tables
            check_version(str(path), version)


def _open(path: Path) -> sqlite3.Connection:
    """Connect for writing; creates the file and its tables."""
    _check_writable(path)
    with wrap_sqlite_errors(path, "cannot open the store"), ExitStack() as undo:
        db = _connect(path)
        undo.callback(db.close)
        db.execute(f"PRAGMA page_size = {PAGE_BYTES}")  # an existing file keeps its own
        (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise StoreError(
                f"cannot open the store {str(path)!r}: its file system has no shared memory;"
                " use a local disk"
            )
        # A commit is on disk when it returns, even after a power cut: an agent that has its reply
        # has its call recorded. Group commit shares the fsync among all callers that wait.
        db.execute("PRAGMA synchronous = FULL")
        _create_tables(db, path)
        undo.pop_all()
    return db


def _check_writable(path: Path) -> None:
    """Refuse a read-only file before SQLite creates its read-only log files beside it."""
    if not path.exists():
        return
    try:
        path.open("r+b").close()
    except OSError as error:
        raise StoreError(
            f"cannot open the store {str(path)!r}: {error.strerror}; {ADVICE['SQLITE_READONLY']}"
        ) from error


def _connect(path: Path) -> sqlite3.Connection:
    """Connect without implicit transactions, for use in another thread."""
    db = sqlite3.connect(
        path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    db.execute("PRAGMA foreign_keys = ON")
    return db


def _connect_read_only(path: Path) -> sqlite3.Connection:
    db = _connect(path)
    db.execute("PRAGMA query_only = ON")
    return db


def _create_tables(db: sqlite3.Connection, path: Path) -> None:
    """Create the tables in an empty file, in one transaction; check the version of others."""
    db.execute("BEGIN IMMEDIATE")
    try:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if version == 0 and tables:
            raise StoreError(f"{str(path)!r} is a database, but not a store of whet")
        if version == 0:
            for statement in TABLES:
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {VERSION}")
        else:
            check_version(str(path), version)
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")
