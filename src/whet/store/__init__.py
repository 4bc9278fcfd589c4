"""Durable record of a run: its queue, calls, rewards, spans, steps and resources."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Each kind of store is imported when one is opened: PostgreSQL and HTTP need extras.
if TYPE_CHECKING:
    from whet.protocols import Store
    from whet.store.sql_store import SQLStore

DEFAULT_RUN = "default"

POSTGRES = ("postgresql://", "postgres://")
HTTP = ("http://", "https://")


def open_store(address: str | Path, *, run: str = DEFAULT_RUN, token: str | None = None) -> "Store":
    """Open a store: an `http(s)://` URL of a store server, or what `open_database` opens.

    The token is the server's; by default it is read from the environment or from `.whet/`.

    Raises:
        StoreError: the store cannot be opened.
        ConfigError: the token is missing, or the URL is invalid.
        MissingExtra: the driver or client is not installed.
    """
    if not str(address).startswith(HTTP):
        return open_database(address, run=run)
    client: Any = importlib.import_module("whet.store.http.client")
    if token is None:
        token = importlib.import_module("whet.store.http.token").find_token()
    return client.HTTPStore.connect(str(address), token=token, run=run)


def is_postgres(address: str) -> bool:
    """Whether the address of a store is that of a PostgreSQL."""
    return address.startswith(POSTGRES)


def open_database(address: str | Path, *, run: str = DEFAULT_RUN) -> "SQLStore":
    """Open a PostgreSQL database by its URL, or a SQLite file by its path.

    Raises:
        StoreError: the database cannot be opened.
        MissingExtra: the PostgreSQL driver is not installed.
    """
    if is_postgres(str(address)):
        postgres: Any = importlib.import_module("whet.store.postgres")
        return postgres.PostgresStore(str(address), run=run)
    sqlite: Any = importlib.import_module("whet.store.sqlite")
    return sqlite.SQLiteStore(address, run=run)
