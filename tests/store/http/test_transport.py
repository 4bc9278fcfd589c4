"""Downloads by the store's HTTP client."""

import asyncio
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from support.store.served_store import TOKEN, serve
from whet.errors import StoreError
from whet.store import DEFAULT_RUN
from whet.store.http.rpc import METHODS
from whet.store.http.transport import Request, RetryingClient
from whet.store.sqlite import SQLiteStore

pytestmark = pytest.mark.anyio


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="of Linux")
async def test_a_download_to_a_full_disk_fails_at_once(tmp_path: Path) -> None:
    url = METHODS["export"].url(run=DEFAULT_RUN)
    request = Request(METHODS["export"].verb, url, download=Path("/dev/full"))
    async with SQLiteStore(tmp_path / "store.db") as store, serve(store) as server:
        client = RetryingClient(server.url, TOKEN, patience_s=10)
        try:
            with anyio.fail_after(5), pytest.raises(StoreError, match="No space left"):
                await asyncio.wrap_future(client.run(client.send(request)))
        finally:
            await to_thread.run_sync(client.close)
