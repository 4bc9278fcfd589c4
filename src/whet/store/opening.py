"""A store by its address."""

import importlib
from pathlib import Path
from typing import Any

from whet.store.sql import DEFAULT_RUN, SQLStore
from whet.store.sqlite import SQLiteStore

POSTGRES = ("postgresql://", "postgres://")


def open_store(address: str | Path, *, run: str = DEFAULT_RUN) -> SQLStore:
    """A PostgreSQL database by its URL, or a SQLite file by its path.

    Raises:
        StoreError: it cannot be opened.
        MissingExtra: it is a URL, and the PostgreSQL driver is not installed.
    """
    if str(address).startswith(POSTGRES):
        # Only here: the driver is an extra.
        postgres: Any = importlib.import_module("whet.store.postgres")
        return postgres.PostgresStore(str(address), run=run)
    return SQLiteStore(address, run=run)
