"""Rollouts, attempts and their leases, as changes to run inside a transaction."""

import json
import sqlite3
from collections.abc import Callable, Sequence
from typing import NamedTuple

from whet.errors import LeaseLost, NotFound
from whet.store.bell import Bell
from whet.store.packing import to_json
from whet.types import (
    RETRIED,
    TERMINAL,
    Attempt,
    AttemptId,
    Failure,
    FailureKind,
    Outcome,
    Rollout,
    Status,
)

ENQUEUE = """
INSERT INTO rollout (id, body, status, attempts, tries_left) VALUES (?, ?, 'queued', 0, ?)
ON CONFLICT (id) DO NOTHING
"""

# A rollout whose lease has run out is claimable: a worker that dies gives its work back without
# anyone having to notice that it died.
CLAIMABLE = """
SELECT seq, id, body, status, attempts FROM rollout INDEXED BY rollout_open
WHERE status IN ('queued', 'running')
  AND (status = 'queued' OR (lease_until <= :now AND tries_left > 0))
ORDER BY seq LIMIT 1
"""

CLAIM = """
UPDATE rollout
SET status = 'running', attempts = attempts + 1, tries_left = tries_left - 1, lease_until = :until
WHERE seq = :seq
"""

START = """
INSERT INTO attempt (id, rollout, number, worker, status, started)
VALUES (?, ?, ?, ?, 'running', ?)
"""

UNCLAIM = """
UPDATE rollout
SET status = 'queued', attempts = attempts - 1, tries_left = tries_left + 1, lease_until = NULL
WHERE seq = ?
"""

# Never shorter than it was: waiters have set their alarm by it.
HEARTBEAT = "UPDATE rollout SET lease_until = max(lease_until, ?) WHERE seq = ?"

END_ATTEMPT = "UPDATE attempt SET status = ?, reward = ?, failure = ?, ended = ? WHERE seq = ?"

END_LEASE = """
UPDATE rollout SET status = ?, tries_left = tries_left + ?, lease_until = NULL WHERE seq = ?
"""

RUNNING = """
SELECT attempt.seq, rollout.seq, rollout.id, attempt.worker, rollout.tries_left
FROM rollout JOIN attempt ON attempt.rollout = rollout.seq AND attempt.number = rollout.attempts
WHERE rollout.status = 'running'
"""

NEXT_EXPIRY = "SELECT min(lease_until) FROM rollout WHERE status = 'running' AND lease_until > ?"

STATUSES = """
SELECT asked.value, rollout.status
FROM json_each(?) AS asked LEFT JOIN rollout ON rollout.id = asked.value
"""


class Running(NamedTuple):
    """An attempt that has not ended."""

    seq: int
    rollout_seq: int
    rollout: str
    worker: str
    tries_left: int


def parse_rollout(body: str) -> Rollout:
    """A stored rollout."""
    return Rollout.model_validate(json.loads(body))


def running_attempt(db: sqlite3.Connection, attempt: str) -> int:
    """The row of an attempt that must not have ended.

    Raises:
        NotFound: there is no such attempt.
        LeaseLost: it has ended.
    """
    row = db.execute("SELECT seq, status FROM attempt WHERE id = ?", (attempt,)).fetchone()
    if row is None:
        raise NotFound(f"there is no attempt {attempt!r}")
    seq, status = row
    if status != Status.RUNNING:
        raise LeaseLost(f"attempt {attempt!r} has ended: {status}")
    return seq


def unfinished(db: sqlite3.Connection, rollouts: Sequence[str]) -> list[str]:
    """Those that are not terminal. Raises NotFound for one that was never enqueued."""
    rows: list[tuple[str, str | None]] = db.execute(STATUSES, (to_json(list(rollouts)),)).fetchall()
    for rollout, status in rows:
        if status is None:
            raise NotFound(f"there is no rollout {rollout!r}")
    return [rollout for rollout, status in rows if status not in TERMINAL]


class Queue:
    """What the writer thread does for the queue.

    Rings `work` when something may have become claimable, `ended` when a rollout is terminal.
    """

    def __init__(self, clock: Callable[[], float], *, work: Bell, ended: Bell) -> None:
        self._clock = clock
        self._work = work
        self._ended = ended
        self._next_expiry = float("inf")

    def enqueue(self, db: sqlite3.Connection, rows: Sequence[tuple[str, str, int]]) -> None:
        db.executemany(ENQUEUE, rows)
        self._work.mark()

    def claim(self, db: sqlite3.Connection, worker: str, lease_s: float) -> Attempt | None:
        now = self._clock()
        row = db.execute(CLAIMABLE, {"now": now}).fetchone()
        if row is None:
            return None
        seq, rollout, body, status, attempts = row
        if status == Status.RUNNING:
            for lost in self._running(db, "rollout.seq = ?", seq):
                self._end_attempt(db, lost.seq, _lost(lost))
        attempt = Attempt(
            id=AttemptId(f"{rollout}.{attempts + 1}"),
            rollout=parse_rollout(body),
            number=attempts + 1,
        )
        db.execute(CLAIM, {"until": now + lease_s, "seq": seq})
        db.execute(START, (attempt.id, seq, attempt.number, worker, now))
        return attempt

    def unclaim(self, db: sqlite3.Connection, attempt: AttemptId) -> None:
        """Undo a claim whose caller had gone before it heard of it."""
        for running in self._running(db, "attempt.id = ?", attempt):
            db.execute("DELETE FROM attempt WHERE seq = ?", (running.seq,))
            db.execute(UNCLAIM, (running.rollout_seq,))
            self._work.mark()

    def heartbeat(self, db: sqlite3.Connection, attempt: AttemptId, lease_s: float) -> None:
        running_attempt(db, attempt)
        for running in self._running(db, "attempt.id = ?", attempt):
            db.execute(HEARTBEAT, (self._clock() + lease_s, running.rollout_seq))

    def finish(self, db: sqlite3.Connection, attempt: AttemptId, outcome: Outcome) -> None:
        running_attempt(db, attempt)
        for running in self._running(db, "attempt.id = ?", attempt):
            self._end_attempt(db, running.seq, outcome)
            failure = outcome.failure
            if failure and failure.kind in RETRIED and running.tries_left > 0:
                self._requeue(db, running)
            else:
                self._end_rollout(db, running, outcome.status)

    def keep_late(self, db: sqlite3.Connection, attempt: AttemptId, outcome: Outcome) -> None:
        """Keep an outcome that was refused, for the record."""
        db.execute(
            "INSERT INTO late_report (attempt, outcome, reported)"
            " SELECT seq, ?, ? FROM attempt WHERE id = ?",
            (to_json(outcome), self._clock(), attempt),
        )

    def release(self, db: sqlite3.Connection) -> int:
        """End every running attempt and queue its rollout again, as if it had not been tried."""
        running = self._running(db, "true")
        for lost in running:
            self._end_attempt(
                db, lost.seq, _worker_lost(f"worker {lost.worker!r} was released by a restart")
            )
            self._requeue(db, lost, tries_back=1)
        return len(running)

    def upkeep(self, db: sqlite3.Connection) -> float | None:
        """Fail those that died in their last attempt; say in how many seconds to look again.

        One that may be tried again stays as it is until somebody claims it: its worker, if only
        slow, can still finish.
        """
        now = self._clock()
        for lost in self._running(db, "rollout.lease_until <= ? AND rollout.tries_left <= 0", now):
            self._end_attempt(db, lost.seq, _lost(lost))
            self._end_rollout(db, lost, Status.FAILED)
        if self._next_expiry <= now:
            self._work.mark()
        (expiry,) = db.execute(NEXT_EXPIRY, (now,)).fetchone()
        self._next_expiry = float("inf") if expiry is None else expiry
        return None if expiry is None else expiry - now

    def _running(self, db: sqlite3.Connection, where: str, *values: str | float) -> list[Running]:
        return [Running(*row) for row in db.execute(f"{RUNNING} AND {where}", values)]

    def _end_attempt(self, db: sqlite3.Connection, seq: int, outcome: Outcome) -> None:
        failure = to_json(outcome.failure) if outcome.failure else None
        db.execute(END_ATTEMPT, (outcome.status, outcome.reward, failure, self._clock(), seq))

    def _requeue(self, db: sqlite3.Connection, running: Running, tries_back: int = 0) -> None:
        db.execute(END_LEASE, (Status.QUEUED, tries_back, running.rollout_seq))
        self._work.mark()

    def _end_rollout(self, db: sqlite3.Connection, running: Running, status: Status) -> None:
        db.execute(END_LEASE, (status, 0, running.rollout_seq))
        self._ended.mark()


def _lost(running: Running) -> Outcome:
    return _worker_lost(f"the lease of worker {running.worker!r} ran out")


def _worker_lost(message: str) -> Outcome:
    return Outcome(failure=Failure(kind=FailureKind.WORKER_LOST, message=message))
