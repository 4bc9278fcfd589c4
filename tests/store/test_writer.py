"""The writer thread, where it goes wrong."""

import sqlite3

import pytest

from whet.errors import StoreError
from whet.store.writer import Writer


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_writer_that_dies_leaves_nobody_waiting() -> None:
    def die() -> None:
        raise RuntimeError("a bell that breaks")

    db = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
    writer = Writer(db, upkeep=lambda db: None, committed=die)
    change = writer.submit(lambda db: 1)
    with pytest.raises(StoreError, match="the store's writer has stopped"):
        change.result(timeout=10)
    writer.close()
    with pytest.raises(StoreError, match="closed"):
        writer.submit(lambda db: 2)
