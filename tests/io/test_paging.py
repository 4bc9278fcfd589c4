from pathlib import Path

import pytest

from whet.io.paging import PAGE, iterate_pages
from whet.store.sqlite import SQLiteStore
from whet.types import Mode, Rollout

pytestmark = pytest.mark.anyio


async def test_all_pages_of_a_mode_in_order(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "store.db")
    modes = [Mode.VAL if number % 2 else Mode.TRAIN for number in range(2 * PAGE + 2)]
    rollouts = [
        Rollout(id=f"r{number}", task={}, group="g", mode=mode) for number, mode in enumerate(modes)
    ]
    await store.enqueue(rollouts)
    pages = [page async for page in iterate_pages(store, mode=Mode.VAL)]
    assert [len(page) for page in pages] == [PAGE, 1]
    found = [record.rollout.id for page in pages for record in page]
    assert found == [rollout.id for rollout in rollouts if rollout.mode is Mode.VAL]
    await store.close()
