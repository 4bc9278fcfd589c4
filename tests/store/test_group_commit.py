"""The writer thread: what shares a transaction, and what happens when it fails."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Generator, Sequence

import anyio
import pytest

from whet.errors import StoreClosed, StoreError, WhetError
from whet.store.database import Db, WorkItem
from whet.store.group_commit import Writer
from whet.store.notify import Notifier

pytestmark = pytest.mark.anyio


class Table:
    """A table of numbers behind a writer, which can be held up."""

    def __init__(self, notifier: Notifier) -> None:
        self.db = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self.db.execute("CREATE TABLE number (n)")
        self.writer = Writer(self.db, notifier, expire_leases=lambda db: None)
        self.batches: list[list[int]] = []
        self.may_continue = threading.Event()

    def write(self, item: WorkItem[int]) -> asyncio.Future[int]:
        item.future = asyncio.get_running_loop().create_future()
        self.writer.submit(item)
        return item.future

    def hold_up(self) -> asyncio.Future[int]:
        """Keep the writer busy until it `may_continue`."""
        is_busy = threading.Event()

        def wait(db: Db, _: object) -> list[int]:
            is_busy.set()
            assert self.may_continue.wait(10)
            return [0]

        busy = self.write(WorkItem(wait))
        assert is_busy.wait(10)
        return busy

    def insert(self, number: int) -> asyncio.Future[int]:
        return self.write(WorkItem(self._insert, number, kind="insert"))

    def _insert(self, db: Db, numbers: Sequence[int]) -> list[int | WhetError]:
        self.batches.append(list(numbers))
        for number in numbers:
            db.execute("INSERT INTO number VALUES (?)", (number,))
            if number < 0:
                raise StoreError("negative")
        return [2 * number for number in numbers]

    def numbers(self) -> list[int]:
        return [n for (n,) in self.db.execute("SELECT n FROM number ORDER BY n")]


@pytest.fixture
def table() -> Generator[Table]:
    table = Table(Notifier())
    yield table
    table.may_continue.set()
    table.writer.close()


async def test_changes_of_one_kind_that_wait_are_one_batch(table: Table) -> None:
    busy = table.hold_up()
    results = asyncio.gather(*(table.insert(n) for n in range(5)))
    table.may_continue.set()
    assert await results == [0, 2, 4, 6, 8]
    assert await table.insert(5) == 10
    assert await busy == 0
    assert table.batches == [[0, 1, 2, 3, 4], [5]]


async def test_a_change_that_raises_is_undone_alone(table: Table) -> None:
    table.hold_up()
    results = asyncio.gather(*(table.insert(n) for n in (1, -2, 3)), return_exceptions=True)
    table.may_continue.set()
    one, refused, three = await results
    assert (one, three) == (2, 6)
    assert isinstance(refused, StoreError)
    assert table.numbers() == [1, 3]


async def test_a_change_canceled_before_it_began_is_not_made(table: Table) -> None:
    table.hold_up()
    canceled, other = table.insert(1), table.insert(2)
    canceled.cancel()
    table.may_continue.set()
    assert await other == 4
    assert table.numbers() == [2]


async def test_closing_commits_what_was_submitted_and_takes_no_more(table: Table) -> None:
    table.hold_up()
    submitted = table.insert(1)
    closing = threading.Thread(target=table.writer.close)
    closing.start()
    table.may_continue.set()
    assert await submitted == 2
    closing.join(10)
    with pytest.raises(StoreClosed):
        table.insert(2)
    table.writer.close()


async def test_a_loop_that_was_closed_does_not_stop_the_writer(table: Table) -> None:
    def submit_and_leave(submit: Callable[[int], object]) -> None:
        async def submit_one() -> None:
            submit(1)

        asyncio.run(submit_one())

    table.hold_up()
    await anyio.to_thread.run_sync(submit_and_leave, table.insert)
    table.may_continue.set()
    assert await table.insert(2) == 4
    assert table.numbers() == [1, 2]


class BrokenNotifier(Notifier):
    def flush(self) -> None:
        raise RuntimeError("broken")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_writer_that_dies_leaves_no_caller_waiting() -> None:
    notifier = BrokenNotifier()
    table = Table(notifier)
    notifier.mark("a key")
    with pytest.raises(StoreClosed, match="the store's writer has stopped"):
        await asyncio.wait_for(table.insert(1), 10)
    table.writer.close()
    with pytest.raises(StoreClosed, match="closed"):
        table.insert(2)
