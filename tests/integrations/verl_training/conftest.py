"""verl's real parts on a CPU, in its own environment: `make test-verl`."""

import asyncio
import os
from collections.abc import Generator

import pytest

from integrations.verl_training.running import TESTS, Verl
from whet.store.http.server import StoreServer
from whet.store.http.token import make_token
from whet.store.sqlite import SQLiteStore


def start_ray() -> None:
    """Start Ray, which gives itself 30 s: a busy machine may need to try again."""
    import ray

    for attempt in range(3):
        try:
            ray.init("local", num_cpus=8, include_dashboard=False, object_store_memory=200 * 2**20)
            return
        except Exception:
            ray.shutdown()
            if attempt == 2:
                raise


@pytest.fixture(scope="session")
def verl(tmp_path_factory: pytest.TempPathFactory) -> Generator[Verl]:
    import ray

    folder = tmp_path_factory.mktemp("verl")
    os.environ["WHET_TEST_FOLDER"] = str(folder)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"
    # verl's queue and its storage reserve CPUs by the number; they hardly use them.
    start_ray()
    store = SQLiteStore(folder / "store.db")
    server = StoreServer(store, token=make_token(folder).value)
    running = Verl(folder, store, server.url)
    try:
        yield running
    finally:
        running.close()
        ray.shutdown()
        server.close()
        asyncio.run(store.close())
