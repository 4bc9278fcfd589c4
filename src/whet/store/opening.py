"""A store by its address."""

import importlib
from pathlib import Path
from typing import Any

from whet.protocols import Store
from whet.store.sql import DEFAULT_RUN, SQLStore
from whet.store.sqlite import SQLiteStore
from whet.store.token import find_token

POSTGRES = ("postgresql://", "postgres://")
HTTP = ("http://", "https://")


def open_store(address: str | Path, *, run: str = DEFAULT_RUN, token: str | None = None) -> Store:
    """A store that is served, by its URL; or a database, as `open_database` does.

    The token is that of the server; without one it is looked for in the environment and in
    `.whet/`.

    Raises:
        StoreError: it cannot be opened.
        ConfigError: there is no token, or the URL is none.
        MissingExtra: what it needs is not installed.
    """
    if str(address).startswith(HTTP):
        # Only here: its library is an extra.
        client: Any = importlib.import_module("whet.store.client")
        asked = find_token() if token is None else token
        return client.HTTPStore.connect(str(address), token=asked, run=run)
    return open_database(address, run=run)


def open_database(address: str | Path, *, run: str = DEFAULT_RUN) -> SQLStore:
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
