"""Fixtures of the runners' tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from whet.store.sqlite import SQLiteStore


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SQLiteStore]:
    async with SQLiteStore(tmp_path / "store.db") as store:
        yield store
