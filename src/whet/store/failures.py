"""SQLite's failures, each in one line that says what to do."""

import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from whet.errors import StoreError, boundary

ADVICE = {
    "SQLITE_FULL": "nothing of the change was kept; free some space on its disk, then go on",
    "SQLITE_IOERR": "nothing of the change was kept; look after its disk, then go on",
    "SQLITE_READONLY": "let this user write the file and its folder",
    "SQLITE_CANTOPEN": "its folder must be there, and this user must be able to write both",
    "SQLITE_BUSY": "another process keeps it locked: wait for that one, or stop it",
    "SQLITE_CORRUPT": "keep a copy, and save what can be read: sqlite3 FILE .recover | sqlite3 NEW",
    "SQLITE_NOTADB": "it is no store, or its beginning is damaged: give the path of another file",
}
"""By the name of the error, or how it begins."""


@contextmanager
def named(path: Path, what: str = "store") -> Generator[None]:
    """Raise whatever goes wrong with a file as StoreError."""
    try:
        with boundary(StoreError, what):
            yield
    except StoreError as error:
        if isinstance(error.__cause__, sqlite3.Error):
            raise StoreError(
                f"{what} {str(path)!r}: {explain(error.__cause__)}"
            ) from error.__cause__
        raise


def must_be_writable(path: Path) -> None:
    """Refuse a file that cannot be written before SQLite leaves others like it beside it.

    Raises:
        StoreError: this user may not write it, or it is no file.
    """
    if not path.exists():
        return
    try:
        path.open("r+b").close()
    except OSError as error:
        raise StoreError(
            f"cannot open the store {str(path)!r}: {error.strerror}; {ADVICE['SQLITE_READONLY']}"
        ) from error


def explain(error: sqlite3.Error) -> str:
    """What went wrong, and what to do."""
    # Errors of the module itself, such as using a closed connection, have no name.
    name: str = getattr(error, "sqlite_errorname", "")
    advice = [text for start, text in ADVICE.items() if name.startswith(start)]
    return "; ".join([str(error), *advice])
