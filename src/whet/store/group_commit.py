"""Group commit: one thread applies the changes of all callers, many to a transaction.

While a commit waits for the disk, further changes queue up; the next transaction takes them all,
so that they share one fsync.
"""

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import Any

from whet.errors import StoreClosed, StoreError, WhetError, boundary
from whet.io.threads import resolve_all
from whet.store.database import Db, WorkItem
from whet.store.notify import Notifier

logger = logging.getLogger(__name__)

Item = WorkItem[Any]  # Any: items of all results share one queue
ItemResult = tuple[Item, Any]
"""An item and its result; a WhetError is raised for its caller."""

MAX_SLEEP_S = 60.0
"""Longest time between two checks of leases: timers stand still while a machine is suspended."""

MAX_TRIES = 10
"""Attempts at a transaction that conflicts with another process."""


class _Refused(WhetError):
    """A change was refused, and may have left something in the transaction."""


def _wrap_errors() -> AbstractContextManager[None]:
    return boundary(StoreError, "store")


def _return_false(error: BaseException | None) -> bool:
    return False


class Writer:
    """Applies work items in the order they came, each wholly or not at all."""

    def __init__(
        self,
        db: Db,
        notifier: Notifier,
        *,
        expire_leases: Callable[[Db], float | None],
        announce: Callable[[Db], None] | None = None,
        on_commit: Callable[[], None] | None = None,
        errors: Callable[[], AbstractContextManager[None]] = _wrap_errors,
        turn: AbstractContextManager[object] | None = None,
        is_transient: Callable[[BaseException | None], bool] = _return_false,
    ) -> None:
        """Start the thread.

        Args:
            db: the connection, which the writer closes.
            notifier: flushed after every commit.
            expire_leases: called in every transaction; returns the seconds until the next lease
                expires.
            announce: called before every commit, to notify other processes of the marked keys.
            on_commit: called after every commit.
            errors: a context that raises the database's errors as StoreError.
            turn: held during each transaction, where other processes write the same database.
            is_transient: whether an error came from a conflict with another process, so that the
                transaction is tried again.
        """
        self._db = db
        self._notifier = notifier
        self._expire_leases = expire_leases
        self._announce = announce
        self._on_commit = on_commit
        self._errors = errors
        self._turn = turn or nullcontext()
        self._is_transient = is_transient
        self._next_expiry = math.inf
        """On the monotonic clock."""
        self._has_failed = False
        """Whether the last transaction failed."""
        self._queue = SimpleQueue[Item | None]()  # None: the end
        self._lock = threading.Lock()
        self._closed = False
        self._begun: list[Item] = []
        self._thread = threading.Thread(target=self._run, name="whet-store-writer", daemon=True)
        self._thread.start()

    def submit(self, item: Item) -> None:
        """Queue a change, from any thread; canceling its future stops it before it has begun.

        Raises:
            StoreClosed: the writer is closed.
        """
        with self._lock:
            if self._closed:
                raise StoreClosed("the store is closed")
            self._queue.put(item)

    def close(self) -> None:
        """Commit what was submitted, and end the thread. Idempotent."""
        self._refuse_more()
        self._thread.join()

    def _refuse_more(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)

    def _run(self) -> None:
        try:
            is_open = True
            while is_open:
                items, is_open = self._take()
                self._begun = [i for i in items if i.future is None or not i.future.cancelled()]
                self._transact([item for item in self._begun if item.in_transaction])
                for item in self._begun:
                    if not item.in_transaction:
                        self._apply_outside(item)
        finally:
            # However the thread ends, every caller that still waits gets an error.
            self._refuse_more()
            stopped = StoreClosed("the store's writer has stopped")
            _resolve((item, stopped) for item in self._begun + self._take_waiting()[0])
            self._db.close()

    def _take(self) -> tuple[list[Item], bool]:
        """Return all waiting items, or none when a lease expires; and whether there may be more."""
        timeout_s = None
        if self._next_expiry < math.inf:
            timeout_s = min(max(self._next_expiry - time.monotonic(), 0.0), MAX_SLEEP_S)
        try:
            first = self._queue.get(timeout=timeout_s)
        except Empty:
            return [], True
        if first is None:
            return [], False
        items, is_open = self._take_waiting()
        return [first, *items], is_open

    def _take_waiting(self) -> tuple[list[Item], bool]:
        items: list[Item] = []
        with suppress(Empty):
            for _ in range(self._queue.qsize()):
                item = self._queue.get_nowait()
                if item is None:
                    return items, False
                items.append(item)
        return items, True

    def _transact(self, items: Sequence[Item]) -> None:
        """Apply items in one transaction, and resolve their futures."""
        tries, with_savepoints = 0, False
        while True:
            try:
                results = self._commit(items, with_savepoints)
            except _Refused:
                self._roll_back()
                with_savepoints = True
            except StoreError as error:
                self._roll_back()
                tries += 1
                if tries < MAX_TRIES and self._is_transient(error.__cause__):
                    continue
                if not self._has_failed:  # a full disk fails every one until there is room
                    logger.error("transaction failed changes=%d error=%s", len(items), error)
                self._has_failed = True
                self._next_expiry = time.monotonic() + MAX_SLEEP_S
                _resolve((item, _copy(error)) for item in items)
                return
            else:
                self._has_failed = False
                if self._on_commit is not None:
                    self._on_commit()
                if self._notifier.marked:
                    self._notifier.flush()
                _resolve(results)
                return

    def _commit(self, items: Sequence[Item], with_savepoints: bool) -> list[ItemResult]:
        results: list[ItemResult] = []
        with self._errors(), self._turn:
            self._db.execute("BEGIN IMMEDIATE")
            if with_savepoints:
                results = [(item, self._apply_in_savepoint(item)) for item in items]
            else:
                for batch in _group_batches(items):
                    results += zip(batch, self._apply(batch), strict=True)
            # The lease reaper has no thread of its own. It runs at the end of every transaction,
            # and the writer wakes up for an empty one when the next lease expires: so a read after
            # a write never finds a rollout running whose last lease had expired by then.
            expires_in_s = self._expire_leases(self._db)
            if self._announce is not None:
                self._announce(self._db)
            self._db.execute("COMMIT")
        self._next_expiry = math.inf if expires_in_s is None else time.monotonic() + expires_in_s
        return results

    def _roll_back(self) -> None:
        with suppress(StoreError), boundary(StoreError, "the database has rolled back itself"):
            self._db.execute("ROLLBACK")

    def _apply(self, batch: Sequence[Item]) -> Sequence[Any]:
        """Apply a batch without a savepoint: refusals are rare, and savepoints are not free."""
        try:
            with self._errors():
                return batch[0].apply(self._db, [item.argument for item in batch])
        except WhetError as error:
            self._raise_if_over(error)
            raise _Refused from error

    def _apply_in_savepoint(self, item: Item) -> Any:
        """Apply one change so that it can be undone without the others."""
        self._db.execute("SAVEPOINT change")
        try:
            with self._errors():
                [result] = item.apply(self._db, [item.argument])
        except WhetError as error:
            self._raise_if_over(error)
            self._db.execute("ROLLBACK TO change")
            result = error
        self._db.execute("RELEASE change")
        return result

    def _raise_if_over(self, error: WhetError) -> None:
        """Fail the whole transaction after a full disk, or a conflict with another process."""
        if not self._db.in_transaction or self._is_transient(error.__cause__):
            raise StoreError(str(error)) from error.__cause__

    def _apply_outside(self, item: Item) -> None:
        """Apply one change outside of any transaction."""
        try:
            with self._errors():
                [result] = item.apply(self._db, [item.argument])
        except WhetError as error:
            result = error
        _resolve([(item, result)])


def _group_batches(items: Sequence[Item]) -> Iterable[list[Item]]:
    """Group items of one kind, at the place of the first of them.

    A caller that waits for one change before the next cannot see the reordering.
    """
    batches = defaultdict[object, list[Item]](list)
    for index, item in enumerate(items):
        batches[index if item.kind is None else item.kind].append(item)
    return batches.values()


def _copy(error: StoreError) -> StoreError:
    """An equal error for another caller: each adds its own traceback."""
    copy = StoreError(str(error))
    copy.__cause__ = error.__cause__
    return copy


def _resolve(results: Iterable[ItemResult]) -> None:
    resolve_all((item.future, result) for item, result in results if item.future is not None)
