"""Every store, for the contracts: a new one is done when it passes them all."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from anyio import to_thread

from support.clock import Clock
from support.servers.postgres_server import own_schema
from whet.protocols import Store
from whet.store.http.client import HTTPStore
from whet.store.http.server import StoreServer
from whet.store.postgres import PostgresStore
from whet.store.sqlite import SQLiteStore


@pytest.fixture
async def sqlite(tmp_path: Path, clock: Clock) -> AsyncGenerator[Store]:
    async with SQLiteStore(tmp_path / "store.db", clock=clock) as store:
        yield store


@pytest.fixture
async def postgres(postgres_url: str, clock: Clock) -> AsyncGenerator[Store]:
    with own_schema(postgres_url) as schema:
        async with PostgresStore(postgres_url, schema=schema, clock=clock) as store:
            yield store


@pytest.fixture
async def http(tmp_path: Path, clock: Clock) -> AsyncGenerator[Store]:
    """A client of a server on a real socket."""
    async with SQLiteStore(tmp_path / "store.db", clock=clock) as served:
        server = StoreServer(served, token="secret")
        try:
            async with HTTPStore.connect(server.url, token="secret", patience_s=5) as store:
                yield store
        finally:
            await to_thread.run_sync(server.close)


@pytest.fixture(params=["sqlite", "postgres", "http"])
def store(request: pytest.FixtureRequest) -> Store:
    return request.getfixturevalue(request.param)
