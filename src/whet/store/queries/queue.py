"""The rollout queue: claims, leases, outcomes and retries, as changes inside a transaction."""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pydantic import JsonValue

from whet.errors import LeaseLost, NotFound, StoreError
from whet.store.codec import parse_resources, parse_rollout, to_json
from whet.store.database import Column, Db
from whet.store.notify import Notifier, end_key, work_key
from whet.store.queries import idempotency, resources
from whet.store.queries.tables import (
    RUN_BY_NAME,
    build_not_running_error,
    find_run,
    insert,
    make_run,
)
from whet.types import (
    NO_FAULT,
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
INSERT INTO rollout
    (run, id, body, mode, grp, priority, tries_left, retry_lost, created, status, attempts, pruned)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'queued', 0, 0)
ON CONFLICT (run, id) DO NOTHING
"""

FIRST_QUEUED = """
SELECT seq, priority, body, status, attempts FROM rollout
WHERE run = ? AND status = 'queued'
ORDER BY priority DESC, seq LIMIT ? /* SKIP LOCKED */
"""

# A rollout whose lease has expired is claimable: a dead worker needs no watchdog. `+run` makes
# SQLite use the index of leases, of which few have expired, not that of all running rollouts.
FIRST_EXPIRED = """
SELECT seq, priority, body, status, attempts FROM rollout
WHERE +run = ? AND status = 'running' AND lease_until <= ? AND tries_left > 0 AND retry_lost = 1
ORDER BY priority DESC, seq LIMIT ? /* SKIP LOCKED */
"""

# Something was recorded in the attempt, so its worker knows of it.
HAS_RECORDS = """
SELECT 1 FROM call WHERE attempt = ? UNION ALL SELECT 1 FROM reward WHERE attempt = ? LIMIT 1
"""

CLAIM = """
UPDATE rollout
SET status = 'running', attempts = attempts + 1, tries_left = tries_left - 1, lease_until = ?
WHERE seq IN (SELECT CAST(value AS BIGINT) FROM json_each(?) AS wanted)
"""

START = """
INSERT INTO attempt (run, id, rollout, number, worker, status, started, resources)
VALUES (?, ?, ?, ?, ?, 'running', ?, ?)
"""

UNCLAIM = """
UPDATE rollout
SET status = 'queued', attempts = attempts - 1, tries_left = tries_left + 1, lease_until = NULL
WHERE seq = ?
"""

# Never shorter than before: the writer sleeps until the lease that it knows.
HEARTBEAT = """
UPDATE rollout SET lease_until = CASE WHEN lease_until > ? THEN lease_until ELSE ? END
WHERE seq = ?
"""

SAVE_WORKER = """
INSERT INTO worker (run, name, started, seen, due) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (run, name) DO UPDATE SET seen = excluded.seen, due = excluded.due
"""

END_ATTEMPT = "UPDATE attempt SET status = ?, reward = ?, failure = ?, ended = ? WHERE seq = ?"

END_LEASE = """
UPDATE rollout SET status = ?, failure = ?, tries_left = tries_left + ?, lease_until = NULL
WHERE seq = ?
"""

RUNNING_ATTEMPTS = """
SELECT attempt.seq, attempt.id, attempt.number, attempt.worker, attempt.started,
    attempt.resources, rollout.seq, rollout.id, rollout.tries_left, rollout.lease_until,
    rollout.body, run.name
FROM rollout
JOIN attempt ON attempt.rollout = rollout.seq AND attempt.number = rollout.attempts
JOIN run ON run.seq = rollout.run
WHERE rollout.status = 'running'
"""

# An attempt is ended under the lock of its rollout, so that one of several writers ends it.
LOCK = "/* LOCK OF rollout */"

SELECTED_ATTEMPTS = f"""
attempt.run = {RUN_BY_NAME} AND attempt.id IN (SELECT value FROM json_each(?) AS wanted)
ORDER BY rollout.seq {LOCK}
"""

EXPIRED_FOR_GOOD = """
rollout.lease_until <= ? AND (rollout.tries_left <= 0 OR rollout.retry_lost = 0)
/* SKIP LOCKED OF rollout */
"""

NEXT_EXPIRY = "SELECT min(lease_until) FROM rollout WHERE status = 'running' AND lease_until > ?"

STATUSES_BY_ID = """
SELECT wanted.value, rollout.status
FROM json_each(?) AS wanted LEFT JOIN rollout ON rollout.run = ? AND rollout.id = wanted.value
"""

UNFINISHED_BY_ID = """
SELECT rollout.seq, rollout.id, rollout.status
FROM json_each(?) AS wanted JOIN rollout ON rollout.run = ? AND rollout.id = wanted.value
WHERE rollout.status IN ('queued', 'running')
ORDER BY rollout.seq /* LOCK OF rollout */
"""

OUTCOME = f"SELECT reward, failure FROM attempt WHERE run = {RUN_BY_NAME} AND id = ?"

CANCELED = Outcome(failure=Failure(kind=FailureKind.CANCELED, message="canceled on request"))


class RunningAttempt(NamedTuple):
    """A running attempt, with its rollout."""

    seq: int
    id: AttemptId
    number: int
    worker: str
    started: float
    resources: str | None
    rollout_seq: int
    rollout: str
    tries_left: int
    lease_until: float
    body: str
    run: str


class Claimable(NamedTuple):
    """A rollout that is queued, or whose lease has expired."""

    seq: int
    priority: int
    body: str
    status: str
    attempts: int


class Claim(NamedTuple):
    """A worker's request for a rollout."""

    worker: str
    lease_s: float
    wait_s: float
    key: str | None
    """Idempotency key."""


class OutcomeReport(NamedTuple):
    """The outcome of an attempt, as its worker reports it."""

    attempt: AttemptId
    outcome: Outcome


class PackedRollout(NamedTuple):
    """A rollout with its JSON."""

    rollout: Rollout
    body: str


def pack_rollout(rollout: Rollout) -> PackedRollout:
    """Encode a rollout, outside of the writer's thread."""
    return PackedRollout(rollout, to_json(rollout))


def list_unfinished(db: Db, run: str, rollouts: Sequence[str]) -> list[str]:
    """Return the rollouts that are not terminal. Raises NotFound for an unknown one."""
    values = (to_json(list(rollouts)), find_run(db, run))
    rows: list[tuple[str, str | None]] = db.execute(STATUSES_BY_ID, values).fetchall()
    for rollout, status in rows:
        if status is None:
            raise NotFound(f"there is no rollout {rollout!r}")
    return [rollout for rollout, status in rows if status not in TERMINAL]


class Queue:
    """The queue of all runs of a database. Its methods run in the writer's thread."""

    def __init__(self, clock: Callable[[], float], notifier: Notifier) -> None:
        self.clock = clock
        self._notifier = notifier
        self.next_expiry = float("inf")
        """When the next lease expires, as of the last `expire_leases`."""
        self.expired = set[int]()
        """Attempts whose lease expired. A transaction that is redone ends the same ones again."""

    def enqueue(self, db: Db, run: str, rollouts: Sequence[PackedRollout]) -> None:
        now = self.clock()
        seq = make_run(db, run, now)
        wanted = ((packed.rollout.id, packed.rollout.resources) for packed in rollouts)
        resources.check_published(db, seq, wanted)
        db.executemany(ENQUEUE, [_build_row(seq, packed, now) for packed in rollouts])
        self._notifier.mark(work_key(run))

    def claim(self, db: Db, run: str, claims: Sequence[Claim]) -> list[Attempt | None]:
        """Start attempts of the next rollouts; a key that was used before returns its attempt.

        Raises:
            LeaseLost: the attempt of a key has ended, or was given back.
        """
        sent_keys = [claim.key for claim in claims if claim.key]
        known = idempotency.read_results(db, run, sent_keys) if sent_keys else {}
        # A claim without a key is identified by its index.
        keys = [claim.key or index for index, claim in enumerate(claims)]
        new = {key: c for key, c in zip(keys, claims, strict=True) if key not in known}
        started = dict(zip(new, self._claim(db, run, list(new.values())), strict=True))
        return [
            self._claim_again(db, run, json.loads(known[claim.key]), claim.lease_s)
            if claim.key in known
            else started[key]
            for key, claim in zip(keys, claims, strict=True)
        ]

    def _claim(self, db: Db, run: str, claims: Sequence[Claim]) -> list[Attempt | None]:
        now, run_seq, count = self.clock(), make_run(db, run, self.clock()), len(claims)
        due = {claim.worker: now + claim.lease_s + claim.wait_s for claim in claims}
        db.executemany(SAVE_WORKER, [(run_seq, name, now, now, due[name]) for name in sorted(due)])
        rows = db.execute(FIRST_EXPIRED, (run_seq, now, count)).fetchall()
        rows += db.execute(FIRST_QUEUED, (run_seq, count)).fetchall()
        found = sorted((Claimable(*row) for row in rows), key=_compute_precedence)
        if len(found) > count:  # a claim that skipped the rest because it was locked looks again
            self._notifier.mark(work_key(run))
        attempts: list[Attempt | None] = [None] * count
        started: list[tuple[Column, ...]] = []
        leases = defaultdict[float, list[int]](list)
        attempt_by_key: dict[str, JsonValue] = {}
        for index, (claim, rollout) in enumerate(zip(claims, found, strict=False)):
            attempts[index] = attempt = self._start(db, run_seq, rollout)
            versions = to_json(attempt.resources) if attempt.resources else None
            leases[claim.lease_s].append(rollout.seq)
            started.append(
                (run_seq, attempt.id, rollout.seq, attempt.number, claim.worker, now, versions)
            )
            if claim.key:
                attempt_by_key[claim.key] = attempt.id
        for lease_s, seqs in leases.items():
            db.execute(CLAIM, (now + lease_s, to_json(seqs)))
        insert(db, START, started)
        if attempt_by_key:
            idempotency.save_results(db, run, attempt_by_key, now)
        return attempts

    def _start(self, db: Db, run: int, rollout: Claimable) -> Attempt:
        if rollout.status == Status.RUNNING:
            for lost in self._select_running(db, "rollout.seq = ?", rollout.seq):
                self._end_attempts(db, [(lost, self._count_expired(lost))])
        parsed, number = parse_rollout(rollout.body), rollout.attempts + 1
        return Attempt(
            id=AttemptId(f"{parsed.id}.{number}"),
            rollout=parsed,
            number=number,
            resources=resources.resolve(db, run, parsed.resources),
        )

    def _claim_again(self, db: Db, run: str, attempt: AttemptId | None, lease_s: float) -> Attempt:
        if attempt is None:
            raise LeaseLost("the claim with this key was given back")
        running, until = self._find_running(db, run, attempt), self.clock() + lease_s
        db.execute(HEARTBEAT, (until, until, running.rollout_seq))
        return Attempt(
            id=running.id,
            rollout=parse_rollout(running.body),
            number=running.number,
            resources=parse_resources(running.resources),
        )

    def unclaim(self, db: Db, run: str, attempt: AttemptId, key: str | None = None) -> None:
        """Undo a claim whose caller was gone before its result came; its key may be used again."""
        if key is not None:
            if idempotency.read_results(db, run, [key]) != {key: to_json(attempt)}:
                return  # given back meanwhile: another claim may have an attempt of this id now
            idempotency.delete_result(db, run, key)
        for running in self._select_attempts(db, run, [attempt]).values():
            if db.execute(HAS_RECORDS, (running.seq, running.seq)).fetchone() is not None:
                raise StoreError(f"attempt {attempt!r} has begun: finish it")
            db.execute("DELETE FROM attempt WHERE seq = ?", (running.seq,))
            db.execute(UNCLAIM, (running.rollout_seq,))
            self._notifier.mark(work_key(run))

    def give_back(self, db: Db, run: str, key: str) -> None:
        """Undo the claim of a key, and let the key claim nothing if it comes again."""
        known = idempotency.read_results(db, run, [key])
        attempt = json.loads(known[key]) if key in known else None
        if attempt is not None:
            self.unclaim(db, run, attempt)
        idempotency.delete_result(db, run, key)
        idempotency.save_results(db, run, {key: None}, self.clock())

    def heartbeat(self, db: Db, run: str, attempt: AttemptId, lease_s: float) -> bool:
        """Renew the lease. Returns False for an attempt past its time limit, which it ends."""
        running, now = self._find_running(db, run, attempt), self.clock()
        limit = parse_rollout(running.body).timeout_s
        is_expired, excess = running.lease_until <= now, now - running.started - limit
        if excess > (0 if is_expired else lease_s):
            # A worker without a lease was suspended, as a laptop is: its agent may not be slow.
            outcome = self._count_expired(running) if is_expired else _build_timeout_outcome(limit)
            self._finish(db, [(running, outcome)])
            return False
        until = now + lease_s
        db.execute(HEARTBEAT, (until, until, running.rollout_seq))
        db.execute(SAVE_WORKER, (find_run(db, run), running.worker, now, now, until))
        return True

    def finish(self, db: Db, run: str, reports: Sequence[OutcomeReport]) -> list[StoreError | None]:
        """End attempts; the outcome that ended an attempt may be reported again."""
        running = self._select_attempts(db, run, [report.attempt for report in reports])
        ended: list[tuple[RunningAttempt, Outcome]] = []
        others: dict[int, OutcomeReport] = {}
        for index, report in enumerate(reports):
            if report.attempt in running:
                ended.append((running.pop(report.attempt), report.outcome))
            else:
                others[index] = report
        self._finish(db, ended)
        refused: list[StoreError | None] = [None] * len(reports)
        for index, (attempt, outcome) in others.items():
            known = db.execute(OUTCOME, (run, attempt)).fetchone()
            if known != (outcome.reward, _serialize_failure(outcome)):
                refused[index] = build_not_running_error(db, run, attempt)
        return refused

    def keep_late(self, db: Db, run: str, attempt: AttemptId, outcome: Outcome) -> None:
        """Record an outcome that was refused because the attempt had ended."""
        db.execute(
            "INSERT INTO late_report (attempt, outcome, reported)"
            " SELECT seq, ?, ? FROM attempt WHERE run = ? AND id = ?",
            (to_json(outcome), self.clock(), find_run(db, run), attempt),
        )

    def cancel(self, db: Db, run: str, rollouts: Sequence[str]) -> int:
        """End rollouts that are queued or running; returns how many."""
        list_unfinished(db, run, rollouts)  # raises NotFound
        values = (to_json(sorted(set(rollouts))), find_run(db, run))
        unfinished = db.execute(UNFINISHED_BY_ID, values).fetchall()
        for seq, rollout, status in unfinished:
            if status == Status.QUEUED:
                self._end_rollout(db, run, seq, rollout, CANCELED)
            for running in self._select_running(db, "rollout.seq = ?", seq):
                self._end_attempts(db, [(running, CANCELED)])
                self._end_rollout(db, run, seq, rollout, CANCELED)
        return len(unfinished)

    def release(self, db: Db, run: str) -> int:
        """End every running attempt and requeue its rollout, at no cost to its `max_attempts`."""
        running = self._select_running(db, f"rollout.run = ? {LOCK}", find_run(db, run))
        for lost in running:
            message = f"worker {lost.worker!r} was released by a restart"
            self._end_attempts(
                db, [(lost, _build_failed_outcome(FailureKind.WORKER_LOST, message))]
            )
            db.execute(END_LEASE, self._build_requeue_state(lost, tries_back=1))
        return len(running)

    def expire_leases(self, db: Db) -> float | None:
        """Fail rollouts whose last allowed attempt lost its lease.

        Returns the seconds until the next lease expires. A rollout that may be retried stays
        running until it is claimed again: its worker, if only slow, can still finish it.
        """
        now = self.clock()
        for lost in self._select_running(db, EXPIRED_FOR_GOOD, now):
            outcome = self._count_expired(lost)
            self._end_attempts(db, [(lost, outcome)])
            self._end_rollout(db, lost.run, lost.rollout_seq, lost.rollout, outcome)
        if self.next_expiry <= now:
            self._mark_claimable(db, now)
        (expiry,) = db.execute(NEXT_EXPIRY, (now,)).fetchone()
        self.next_expiry = float("inf") if expiry is None else expiry
        return None if expiry is None else expiry - now

    def _count_expired(self, lost: RunningAttempt) -> Outcome:
        """Count an attempt whose lease expired, and return its outcome."""
        self.expired.add(lost.seq)
        message = f"the lease of worker {lost.worker!r} expired"
        return _build_failed_outcome(FailureKind.WORKER_LOST, message)

    def _mark_claimable(self, db: Db, now: float) -> None:
        rows = db.execute(
            "SELECT DISTINCT run.name FROM rollout JOIN run ON run.seq = rollout.run"
            " WHERE rollout.status = 'running' AND rollout.lease_until <= ?",
            (now,),
        )
        for (run,) in rows:
            self._notifier.mark(work_key(run))

    def _select_running(self, db: Db, where: str, *values: Column) -> list[RunningAttempt]:
        rows = db.execute(f"{RUNNING_ATTEMPTS} AND {where}", values)
        return [RunningAttempt(*row) for row in rows]

    def _select_attempts(
        self, db: Db, run: str, attempts: Sequence[AttemptId]
    ) -> dict[AttemptId, RunningAttempt]:
        found = self._select_running(db, SELECTED_ATTEMPTS, run, to_json(list(attempts)))
        return {running.id: running for running in found}

    def _find_running(self, db: Db, run: str, attempt: AttemptId) -> RunningAttempt:
        running = self._select_attempts(db, run, [attempt])
        if not running:
            raise build_not_running_error(db, run, attempt)
        return running[attempt]

    def _finish(self, db: Db, ended: Sequence[tuple[RunningAttempt, Outcome]]) -> None:
        self._end_attempts(db, ended)
        db.executemany(
            END_LEASE, [self._compute_next_state(running, outcome) for running, outcome in ended]
        )

    def _end_attempts(self, db: Db, ended: Sequence[tuple[RunningAttempt, Outcome]]) -> None:
        now = self.clock()
        db.executemany(
            END_ATTEMPT,
            [
                (o.status.value, o.reward, _serialize_failure(o), now, running.seq)
                for running, o in ended
            ],
        )
        for running, _ in ended:
            self._notifier.mark(end_key(running.run, running.id))

    def _end_rollout(self, db: Db, run: str, seq: int, rollout: str, outcome: Outcome) -> None:
        db.execute(END_LEASE, self._end_state(run, seq, rollout, outcome))

    # The next state of a rollout, as the values of END_LEASE.

    def _compute_next_state(self, running: RunningAttempt, outcome: Outcome) -> tuple[Column, ...]:
        kind = outcome.failure.kind if outcome.failure else None
        tries_back = int(kind in NO_FAULT)
        if running.tries_left + tries_back > 0 and kind in parse_rollout(running.body).retried:
            return self._build_requeue_state(running, tries_back)
        return self._end_state(running.run, running.rollout_seq, running.rollout, outcome)

    def _build_requeue_state(self, running: RunningAttempt, tries_back: int) -> tuple[Column, ...]:
        self._notifier.mark(work_key(running.run))
        return (Status.QUEUED.value, None, tries_back, running.rollout_seq)

    def _end_state(self, run: str, seq: int, rollout: str, outcome: Outcome) -> tuple[Column, ...]:
        self._notifier.mark(end_key(run, rollout))
        failure = outcome.failure
        reason = to_json(failure.model_copy(update={"traceback": ""})) if failure else None
        return (outcome.status.value, reason, 0, seq)


def _build_row(run: int, packed: PackedRollout, now: float) -> tuple[Column, ...]:
    rollout = packed.rollout
    return (
        run,
        rollout.id,
        packed.body,
        rollout.mode.value,
        rollout.group,
        rollout.priority,
        rollout.max_attempts,
        int(FailureKind.WORKER_LOST in rollout.retried),
        now,
    )


def _compute_precedence(rollout: Claimable) -> tuple[int, int]:
    return -rollout.priority, rollout.seq


def _serialize_failure(outcome: Outcome) -> str | None:
    return to_json(outcome.failure) if outcome.failure else None


def _build_timeout_outcome(limit: float) -> Outcome:
    return _build_failed_outcome(FailureKind.TIMEOUT, f"the attempt ran longer than {limit:g} s")


def _build_failed_outcome(kind: FailureKind, message: str) -> Outcome:
    return Outcome(failure=Failure(kind=kind, message=message))
