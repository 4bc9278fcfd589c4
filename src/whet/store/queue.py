"""Rollouts, attempts and their leases, as changes to run inside a transaction."""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pydantic import JsonValue

from whet.errors import LeaseLost, NotFound, StoreError
from whet.store import resources, tickets
from whet.store.attempts import OF_RUN, has_ended_so, why_not_running
from whet.store.bell import Bell, end_of, work_in
from whet.store.database import Column, Db, insert
from whet.store.packed import parse_resources, parse_rollout
from whet.store.packing import to_json
from whet.store.runs import find_run, make_run
from whet.types import (
    BLAMELESS,
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

# A rollout whose lease has run out is claimable: a worker that dies gives its work back without
# anyone having to notice that it died. `+run`: the index to use is the one of leases, of which few
# have run out, not the one of all that run.
FIRST_EXPIRED = """
SELECT seq, priority, body, status, attempts FROM rollout
WHERE +run = ? AND status = 'running' AND lease_until <= ? AND tries_left > 0 AND retry_lost = 1
ORDER BY priority DESC, seq LIMIT ? /* SKIP LOCKED */
"""

# Of an attempt whose worker has heard of it.
BEGUN = """
SELECT 1 FROM call WHERE attempt = ? UNION ALL SELECT 1 FROM reward WHERE attempt = ? LIMIT 1
"""

CLAIM = """
UPDATE rollout
SET status = 'running', attempts = attempts + 1, tries_left = tries_left - 1, lease_until = ?
WHERE seq IN (SELECT CAST(value AS BIGINT) FROM json_each(?) AS asked)
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

# Never shorter than it was: waiters have set their alarm by it.
HEARTBEAT = """
UPDATE rollout SET lease_until = CASE WHEN lease_until > ? THEN lease_until ELSE ? END
WHERE seq = ?
"""

# Written when somebody new comes, and then no more often than its word runs out.
SEEN = """
INSERT INTO worker (run, name, started, seen, due) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (run, name) DO UPDATE SET seen = excluded.seen, due = excluded.due
"""

END_ATTEMPT = "UPDATE attempt SET status = ?, reward = ?, failure = ?, ended = ? WHERE seq = ?"

END_LEASE = """
UPDATE rollout SET status = ?, failure = ?, tries_left = tries_left + ?, lease_until = NULL
WHERE seq = ?
"""

RUNNING = """
SELECT attempt.seq, attempt.id, attempt.number, attempt.worker, attempt.started,
    attempt.resources, rollout.seq, rollout.id, rollout.tries_left, rollout.body, run.name
FROM rollout
JOIN attempt ON attempt.rollout = rollout.seq AND attempt.number = rollout.attempts
JOIN run ON run.seq = rollout.run
WHERE rollout.status = 'running'
"""

# Whoever ends an attempt holds its rollout: with several writers, one of them does.
LOCK = "/* LOCK OF rollout */"

OF_ATTEMPTS = f"""
attempt.run = {OF_RUN} AND attempt.id IN (SELECT value FROM json_each(?) AS asked)
ORDER BY rollout.seq {LOCK}
"""

DOOMED = """
rollout.lease_until <= ? AND (rollout.tries_left <= 0 OR rollout.retry_lost = 0)
/* SKIP LOCKED OF rollout */
"""

NEXT_EXPIRY = "SELECT min(lease_until) FROM rollout WHERE status = 'running' AND lease_until > ?"

STATUSES = """
SELECT asked.value, rollout.status
FROM json_each(?) AS asked LEFT JOIN rollout ON rollout.run = ? AND rollout.id = asked.value
"""

OPEN = """
SELECT rollout.seq, rollout.id, rollout.status
FROM json_each(?) AS asked JOIN rollout ON rollout.run = ? AND rollout.id = asked.value
WHERE rollout.status IN ('queued', 'running')
ORDER BY rollout.seq /* LOCK OF rollout */
"""

CANCELLED = Outcome(
    failure=Failure(kind=FailureKind.CANCELLED, message="cancelled by whoever ordered it")
)


class Running(NamedTuple):
    """An attempt that has not ended."""

    seq: int
    id: AttemptId
    number: int
    worker: str
    started: float
    resources: str | None
    rollout_seq: int
    rollout: str
    tries_left: int
    body: str
    run: str


class Claimable(NamedTuple):
    """A rollout that waits for a worker, or whose worker is lost."""

    seq: int
    priority: int
    body: str
    status: str
    attempts: int


class Claim(NamedTuple):
    """Somebody who wants work."""

    worker: str
    lease_s: float
    wait_s: float
    ticket: str | None


class Report(NamedTuple):
    """How an attempt ended, says its worker."""

    attempt: AttemptId
    outcome: Outcome


class Packed(NamedTuple):
    """A rollout as the table holds it."""

    rollout: Rollout
    body: str


def pack_rollout(rollout: Rollout) -> Packed:
    """Everything that can be done before the writer's turn."""
    return Packed(rollout, to_json(rollout))


def unfinished(db: Db, run: str, rollouts: Sequence[str]) -> list[str]:
    """Those that are not terminal. Raises NotFound for one that was never enqueued."""
    asked = (to_json(list(rollouts)), find_run(db, run))
    rows: list[tuple[str, str | None]] = db.execute(STATUSES, asked).fetchall()
    for rollout, status in rows:
        if status is None:
            raise NotFound(f"there is no rollout {rollout!r}")
    return [rollout for rollout, status in rows if status not in TERMINAL]


class Queue:
    """What the writer thread does for the queue, for all runs of a database."""

    def __init__(self, clock: Callable[[], float], bell: Bell) -> None:
        self.clock = clock
        self._bell = bell
        self.next_expiry = float("inf")
        """The first lease that runs out, as of the last upkeep."""
        self.expired = 0
        """Leases that ran out and cost a worker its attempt."""

    def enqueue(self, db: Db, run: str, rollouts: Sequence[Packed]) -> None:
        now = self.clock()
        seq = make_run(db, run, now)
        wanted = ((packed.rollout.id, packed.rollout.resources) for packed in rollouts)
        resources.check(db, seq, wanted)
        db.executemany(ENQUEUE, [_row(seq, packed, now) for packed in rollouts])
        self._bell.mark(work_in(run))

    def claim(self, db: Db, run: str, claims: Sequence[Claim]) -> list[Attempt | None]:
        """Take the next rollouts; with a ticket that took one already, that one again.

        Raises:
            LeaseLost: what a ticket took has ended, or was given back.
        """
        taken = tickets.recall(db, run, [claim.ticket for claim in claims if claim.ticket])
        keys = [claim.ticket or place for place, claim in enumerate(claims)]
        new = {key: c for key, c in zip(keys, claims, strict=True) if key not in taken}
        given = dict(zip(new, self._claim(db, run, list(new.values())), strict=True))
        return [
            self._take_again(db, run, json.loads(taken[claim.ticket]), claim.lease_s)
            if claim.ticket in taken
            else given[key]
            for key, claim in zip(keys, claims, strict=True)
        ]

    def _claim(self, db: Db, run: str, claims: Sequence[Claim]) -> list[Attempt | None]:
        now, run_seq, count = self.clock(), make_run(db, run, self.clock()), len(claims)
        due = {claim.worker: now + claim.lease_s + claim.wait_s for claim in claims}
        db.executemany(SEEN, [(run_seq, name, now, now, due[name]) for name in sorted(due)])
        rows = db.execute(FIRST_EXPIRED, (run_seq, now, count)).fetchall()
        rows += db.execute(FIRST_QUEUED, (run_seq, count)).fetchall()
        found = sorted((Claimable(*row) for row in rows), key=_precedence)
        if len(found) > count:  # who was kept from the others meanwhile shall look again
            self._bell.mark(work_in(run))
        attempts: list[Attempt | None] = [None] * count
        started: list[tuple[Column, ...]] = []
        leases = defaultdict[float, list[int]](list)
        held: dict[str, JsonValue] = {}
        for place, (claim, rollout) in enumerate(zip(claims, found, strict=False)):
            attempts[place] = attempt = self._start(db, run_seq, rollout)
            given = to_json(attempt.resources) if attempt.resources else None
            leases[claim.lease_s].append(rollout.seq)
            started.append(
                (run_seq, attempt.id, rollout.seq, attempt.number, claim.worker, now, given)
            )
            if claim.ticket:
                held[claim.ticket] = attempt.id
        for lease_s, seqs in leases.items():
            db.execute(CLAIM, (now + lease_s, to_json(seqs)))
        insert(db, START, started)
        tickets.remember(db, run, held, now)
        return attempts

    def _start(self, db: Db, run: int, rollout: Claimable) -> Attempt:
        if rollout.status == Status.RUNNING:
            for lost in self._running(db, "rollout.seq = ?", rollout.seq):
                self._end_attempts(db, [(lost, _lost(lost))])
                self.expired += 1
        parsed, number = parse_rollout(rollout.body), rollout.attempts + 1
        return Attempt(
            id=AttemptId(f"{parsed.id}.{number}"),
            rollout=parsed,
            number=number,
            resources=resources.resolve(db, run, parsed.resources),
        )

    def _take_again(self, db: Db, run: str, attempt: AttemptId | None, lease_s: float) -> Attempt:
        if attempt is None:
            raise LeaseLost("what was claimed with this ticket was given back")
        running, until = self._must_run(db, run, attempt), self.clock() + lease_s
        db.execute(HEARTBEAT, (until, until, running.rollout_seq))
        return Attempt(
            id=running.id,
            rollout=parse_rollout(running.body),
            number=running.number,
            resources=parse_resources(running.resources),
        )

    def unclaim(self, db: Db, run: str, attempt: AttemptId, ticket: str | None = None) -> None:
        """Undo a claim whose caller had gone before it heard of it; its ticket is as new."""
        for running in self._running_attempts(db, run, [attempt]).values():
            if db.execute(BEGUN, (running.seq, running.seq)).fetchone() is not None:
                raise StoreError(f"attempt {attempt!r} has begun: finish it")
            db.execute("DELETE FROM attempt WHERE seq = ?", (running.seq,))
            db.execute(UNCLAIM, (running.rollout_seq,))
            self._bell.mark(work_in(run))
        if ticket is not None:
            tickets.forget(db, run, ticket)

    def give_back(self, db: Db, run: str, ticket: str) -> None:
        """Undo what was claimed with a ticket, and claim nothing with it if it comes again."""
        taken = tickets.recall(db, run, [ticket]).get(ticket)
        attempt = None if taken is None else json.loads(taken)
        if attempt is not None:
            self.unclaim(db, run, attempt)
        tickets.forget(db, run, ticket)
        tickets.remember(db, run, {ticket: None}, self.clock())

    def heartbeat(self, db: Db, run: str, attempt: AttemptId, lease_s: float) -> bool:
        """Whether the attempt may go on; one that outlived its limit by a lease is ended."""
        running, now = self._must_run(db, run, attempt), self.clock()
        limit = parse_rollout(running.body).timeout_s
        if now > running.started + limit + lease_s:
            self._finish(db, [(running, _timeout(limit))])
            return False
        until = now + lease_s
        db.execute(HEARTBEAT, (until, until, running.rollout_seq))
        db.execute(SEEN, (find_run(db, run), running.worker, now, now, until))
        return True

    def finish(self, db: Db, run: str, reports: Sequence[Report]) -> list[StoreError | None]:
        """End attempts; one that this very outcome has ended is reported again, not late."""
        running = self._running_attempts(db, run, [report.attempt for report in reports])
        mine: list[tuple[Running, Outcome]] = []
        again: dict[int, Report] = {}
        for place, report in enumerate(reports):
            if report.attempt in running:
                mine.append((running.pop(report.attempt), report.outcome))
            else:
                again[place] = report
        self._finish(db, mine)
        refused: list[StoreError | None] = [None] * len(reports)
        for place, (attempt, outcome) in again.items():
            if not has_ended_so(db, run, attempt, outcome.reward, _failure(outcome)):
                refused[place] = why_not_running(db, run, attempt)
        return refused

    def keep_late(self, db: Db, run: str, attempt: AttemptId, outcome: Outcome) -> None:
        """Keep an outcome that was refused, for the record."""
        db.execute(
            "INSERT INTO late_report (attempt, outcome, reported)"
            " SELECT seq, ?, ? FROM attempt WHERE run = ? AND id = ?",
            (to_json(outcome), self.clock(), find_run(db, run), attempt),
        )

    def cancel(self, db: Db, run: str, rollouts: Sequence[str]) -> int:
        """End what has not ended."""
        unfinished(db, run, rollouts)  # refuses what is unknown
        asked = (to_json(sorted(set(rollouts))), find_run(db, run))
        open_ = db.execute(OPEN, asked).fetchall()
        for seq, rollout, status in open_:
            if status == Status.QUEUED:
                self._end_rollout(db, run, seq, rollout, CANCELLED)
            for running in self._running(db, "rollout.seq = ?", seq):
                self._end_attempts(db, [(running, CANCELLED)])
                self._end_rollout(db, run, seq, rollout, CANCELLED)
        return len(open_)

    def release(self, db: Db, run: str) -> int:
        """End every running attempt and queue its rollout again, as if it had not been tried."""
        running = self._running(db, f"rollout.run = ? {LOCK}", find_run(db, run))
        for lost in running:
            message = f"worker {lost.worker!r} was released by a restart"
            self._end_attempts(db, [(lost, _failed(FailureKind.WORKER_LOST, message))])
            db.execute(END_LEASE, self._requeued(lost, tries_back=1))
        return len(running)

    def upkeep(self, db: Db) -> float | None:
        """Fail those that died in their last attempt; say in how many seconds to look again.

        One that may be tried again stays as it is until somebody claims it: its worker, if only
        slow, can still finish.
        """
        now = self.clock()
        for lost in self._running(db, DOOMED, now):
            self._end_attempts(db, [(lost, _lost(lost))])
            self._end_rollout(db, lost.run, lost.rollout_seq, lost.rollout, _lost(lost))
            self.expired += 1
        if self.next_expiry <= now:
            self._mark_expired(db, now)
        (expiry,) = db.execute(NEXT_EXPIRY, (now,)).fetchone()
        self.next_expiry = float("inf") if expiry is None else expiry
        return None if expiry is None else expiry - now

    def _mark_expired(self, db: Db, now: float) -> None:
        rows = db.execute(
            "SELECT DISTINCT run.name FROM rollout JOIN run ON run.seq = rollout.run"
            " WHERE rollout.status = 'running' AND rollout.lease_until <= ?",
            (now,),
        )
        for (run,) in rows:
            self._bell.mark(work_in(run))

    def _running(self, db: Db, where: str, *values: Column) -> list[Running]:
        return [Running(*row) for row in db.execute(f"{RUNNING} AND {where}", values)]

    def _running_attempts(
        self, db: Db, run: str, attempts: Sequence[AttemptId]
    ) -> dict[AttemptId, Running]:
        found = self._running(db, OF_ATTEMPTS, run, to_json(list(attempts)))
        return {running.id: running for running in found}

    def _must_run(self, db: Db, run: str, attempt: AttemptId) -> Running:
        running = self._running_attempts(db, run, [attempt])
        if not running:
            raise why_not_running(db, run, attempt)
        return running[attempt]

    def _finish(self, db: Db, ended: Sequence[tuple[Running, Outcome]]) -> None:
        self._end_attempts(db, ended)
        db.executemany(END_LEASE, [self._after(running, outcome) for running, outcome in ended])

    def _end_attempts(self, db: Db, ended: Sequence[tuple[Running, Outcome]]) -> None:
        now = self.clock()
        db.executemany(
            END_ATTEMPT,
            [(o.status.value, o.reward, _failure(o), now, running.seq) for running, o in ended],
        )
        for running, _ in ended:
            self._bell.mark(end_of(running.run, running.id))

    def _end_rollout(self, db: Db, run: str, seq: int, rollout: str, outcome: Outcome) -> None:
        db.execute(END_LEASE, self._over(run, seq, rollout, outcome))

    # What becomes of a rollout, as the values of END_LEASE.

    def _after(self, running: Running, outcome: Outcome) -> tuple[Column, ...]:
        tries_back = int(outcome.failure is not None and outcome.failure.kind in BLAMELESS)
        if running.tries_left + tries_back > 0 and _is_retried(running, outcome):
            return self._requeued(running, tries_back)
        return self._over(running.run, running.rollout_seq, running.rollout, outcome)

    def _requeued(self, running: Running, tries_back: int) -> tuple[Column, ...]:
        self._bell.mark(work_in(running.run))
        return (Status.QUEUED.value, None, tries_back, running.rollout_seq)

    def _over(self, run: str, seq: int, rollout: str, outcome: Outcome) -> tuple[Column, ...]:
        self._bell.mark(end_of(run, rollout))
        return (outcome.status.value, _failure(outcome), 0, seq)


def _row(run: int, packed: Packed, now: float) -> tuple[Column, ...]:
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


def _precedence(rollout: Claimable) -> tuple[int, int]:
    return -rollout.priority, rollout.seq


def _is_retried(running: Running, outcome: Outcome) -> bool:
    failure = outcome.failure
    return failure is not None and failure.kind in parse_rollout(running.body).retried


def _failure(outcome: Outcome) -> str | None:
    return to_json(outcome.failure) if outcome.failure else None


def _lost(running: Running) -> Outcome:
    return _failed(FailureKind.WORKER_LOST, f"the lease of worker {running.worker!r} ran out")


def _timeout(limit: float) -> Outcome:
    return _failed(FailureKind.TIMEOUT, f"the attempt ran longer than {limit:g} s")


def _failed(kind: FailureKind, message: str) -> Outcome:
    return Outcome(failure=Failure(kind=kind, message=message))
