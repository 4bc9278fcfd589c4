"""`SqliteLightningStore`: the store in memory, which writes every change to a SQLite file."""

import asyncio
import sqlite3
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from pydantic import BaseModel

from whet.agl.spans import Span
from whet.agl.store.memory import InMemoryLightningStore
from whet.agl.types import QUEUING, RUNNING, Attempt, ResourcesUpdate, Rollout, Worker
from whet.errors import StoreClosed, StoreError, boundary
from whet.io.threads import resolve_all

SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    kind TEXT NOT NULL,
    id TEXT NOT NULL,
    position INTEGER NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (kind, id)
)
"""
UPSERT = """
INSERT INTO records VALUES (?, ?, ?, ?)
ON CONFLICT DO UPDATE SET position = excluded.position, value = excluded.value
"""

KINDS: dict[type[BaseModel], str] = {
    Rollout: "rollout",
    Attempt: "attempt",
    Span: "span",
    ResourcesUpdate: "resources",
    Worker: "worker",
}


class _Change(NamedTuple):
    kind: str
    id: str
    position: int
    """Order among records of its kind; of a rollout in the queue, its place there."""
    value: str


class _Batch(NamedTuple):
    changes: list[_Change]
    done: asyncio.Future[None]


class SqliteLightningStore(InMemoryLightningStore):
    """A store in a file: what a call has changed is on disk when it returns.

    The records are also in memory, where queries read them; opening the file loads them.
    """

    def __init__(self, path: str | Path, *, scan_debounce_seconds: float = 10.0) -> None:
        """Raises StoreError if the file cannot be opened."""
        super().__init__(scan_debounce_seconds=scan_debounce_seconds)
        self._position = 0
        self._pending: list[_Change] = []
        self._batches = SimpleQueue[_Batch | None]()
        with boundary(StoreError, f"cannot open the store {str(path)!r}"):
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute(SCHEMA)
            self._load()
        self._closed = False
        self._thread = threading.Thread(
            target=self._write_batches, name="whet-agl-store", daemon=True
        )
        self._thread.start()

    async def close(self) -> None:
        """Write what is pending, and close the file. Idempotent."""
        if not self._closed:
            self._closed = True
            self._batches.put(None)
            await asyncio.to_thread(self._thread.join)
            self._db.close()

    def _record_change(self, record: BaseModel) -> None:
        kind = KINDS[type(record)]
        position = self._position = self._position + 1
        self._pending.append(_Change(kind, _build_key(record), position, record.model_dump_json()))

    async def _flush(self) -> None:
        with self._lock:
            if self._closed:
                raise StoreClosed("the store is closed")
            changes, self._pending = self._pending, []
            # Queued even if it is empty: another thread may have queued the changes of this one.
            done = asyncio.get_running_loop().create_future()
            self._batches.put(_Batch(changes, done))
        await done

    def _write_batches(self) -> None:
        """Commit batches until the store closes: all that are waiting, in one transaction."""
        is_open = True
        while is_open:
            batches = [self._batches.get()]
            batches += [self._batches.get() for _ in range(self._batches.qsize())]
            is_open = None not in batches
            found = [batch for batch in batches if batch is not None]
            error = self._commit([change for batch in found for change in batch.changes])
            resolve_all((batch.done, error) for batch in found)

    def _commit(self, changes: list[_Change]) -> StoreError | None:
        if not changes:
            return None
        try:
            with boundary(StoreError, "store"):
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany(UPSERT, changes)
                self._db.execute("COMMIT")
        except StoreError as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            return error
        return None

    def _load(self) -> None:
        rows = self._db.execute("SELECT kind, position, value FROM records ORDER BY rowid")
        positions: dict[str, int] = {}
        for kind, position, value in rows:
            self._position = max(self._position, position)
            match kind:
                case "rollout":
                    rollout = Rollout.model_validate_json(value)
                    self._rollouts[rollout.rollout_id] = rollout
                    positions[rollout.rollout_id] = position
                case "attempt":
                    attempt = Attempt.model_validate_json(value)
                    self._attempts[attempt.rollout_id].append(attempt)
                case "span":
                    self._load_span(Span.model_validate_json(value))
                case "resources":
                    update = ResourcesUpdate.model_validate_json(value)
                    self._resources[update.resources_id] = update
                case _:
                    worker = Worker.model_validate_json(value)
                    self._workers[worker.worker_id] = worker
        latest = max(self._resources.values(), key=lambda each: each.update_time, default=None)
        self._latest_resources_id = latest.resources_id if latest else ""
        for id in sorted(positions, key=lambda id: positions[id]):
            if self._rollouts[id].status in QUEUING:
                self._queue.append(id)
                self._queued_ids.add(id)
            elif self._rollouts[id].status in RUNNING:
                self._running_ids[id] = None

    def _load_span(self, span: Span) -> None:
        id = span.rollout_id
        self._spans[id][span.attempt_id, span.span_id] = span
        self._sequence[id] = max(self._sequence[id], span.sequence_id)


def _build_key(record: BaseModel) -> str:
    match record:
        case Span():
            return f"{record.rollout_id}/{record.attempt_id}/{record.span_id}"
        case Attempt():
            return f"{record.rollout_id}/{record.attempt_id}"
        case Rollout():
            return record.rollout_id
        case ResourcesUpdate():
            return record.resources_id
        case Worker():
            return record.worker_id
        case _:
            raise TypeError(f"expected a record of the store, found {type(record).__name__}")
