"""Listings: the rollouts, attempts and workers of a run, and counts."""

import json
from collections import defaultdict
from typing import NamedTuple

from whet.store.codec import parse_resources, parse_rollout
from whet.store.database import Column, Db
from whet.store.queries.tables import find_rollout, find_run
from whet.types import AttemptId, AttemptRecord, Mode, Outcome, RolloutRecord, Status, WorkerRecord

ROLLOUTS = """
SELECT rollout.body, rollout.status, rollout.attempts, rollout.created, rollout.failure,
    attempt.reward
FROM rollout
LEFT JOIN attempt ON attempt.rollout = rollout.seq AND attempt.number = rollout.attempts
WHERE rollout.run = ? AND rollout.seq > ?
"""

ATTEMPTS = """
SELECT seq, id, number, worker, status, started, ended, reward, failure, resources
FROM attempt WHERE rollout = ? ORDER BY number
"""

LATE_REPORTS = """
SELECT late_report.attempt, late_report.outcome
FROM late_report JOIN attempt ON attempt.seq = late_report.attempt
WHERE attempt.rollout = ? ORDER BY late_report.seq
"""

WORKERS = "SELECT name, started, seen, due FROM worker WHERE run = ? ORDER BY seen DESC, name"

WORKER_ATTEMPTS = "SELECT worker, id FROM attempt WHERE run = ? AND status = 'running' ORDER BY seq"

ROLLOUTS_BY_STATUS = """
SELECT run.name, rollout.status, count(*)
FROM rollout JOIN run ON run.seq = rollout.run
GROUP BY run.name, rollout.status ORDER BY run.name, rollout.status
"""

LIVE_WORKERS = """
SELECT run.name, count(worker.name)
FROM run LEFT JOIN worker ON worker.run = run.seq AND worker.due >= ?
GROUP BY run.name ORDER BY run.name
"""

COUNTS = """
SELECT
    (SELECT count(*) FROM rollout WHERE run = ?),
    (SELECT count(*) FROM attempt WHERE run = ?),
    (SELECT count(*) FROM call JOIN attempt ON attempt.seq = call.attempt WHERE attempt.run = ?),
    (SELECT count(*) FROM span JOIN attempt ON attempt.seq = span.attempt WHERE attempt.run = ?)
"""

SAMPLED_IN_RUN = """
SELECT count(*), coalesce(sum(length(generation.tokens)), 0) / 4
FROM generation
JOIN call ON call.seq = generation.call
JOIN attempt ON attempt.seq = call.attempt
WHERE attempt.run = ?
"""


def read_rollouts(
    db: Db,
    run: str,
    *,
    status: Status | None,
    mode: Mode | None,
    group: str | None,
    after: str | None,
    limit: int,
) -> list[RolloutRecord]:
    """Read a page of rollouts. Raises NotFound."""
    run_seq = find_run(db, run)
    values: list[Column] = [run_seq, 0 if after is None else find_rollout(db, run_seq, after)]
    sql = ROLLOUTS
    for column, value in (("status", status), ("mode", mode), ("grp", group)):
        if value is not None:
            sql += f" AND rollout.{column} = ?"
            values.append(str(value))
    rows = db.execute(f"{sql} ORDER BY rollout.seq LIMIT ?", (*values, limit))
    return [
        RolloutRecord(
            rollout=parse_rollout(body),
            status=Status(state),
            attempts=attempts,
            created=created,
            reward=reward if state == Status.SUCCEEDED else None,
            failure=json.loads(failure) if failure else None,
        )
        for body, state, attempts, created, failure, reward in rows
    ]


def read_attempts(db: Db, run: str, rollout: str) -> list[AttemptRecord]:
    """Read the attempts of a rollout, with their late reports. Raises NotFound."""
    seq = find_rollout(db, find_run(db, run), rollout)
    late = defaultdict[int, list[Outcome]](list)
    for attempt, outcome in db.execute(LATE_REPORTS, (seq,)):
        late[attempt].append(Outcome.model_validate(json.loads(outcome)))
    return [
        AttemptRecord(
            id=AttemptId(id_),
            number=number,
            worker=worker,
            status=Status(status),
            started=started,
            ended=ended,
            reward=reward,
            failure=json.loads(failure) if failure else None,
            resources=parse_resources(resources),
            late=tuple(late[attempt]),
        )
        for attempt, id_, number, worker, status, started, ended, reward, failure, resources in (
            db.execute(ATTEMPTS, (seq,))
        )
    ]


def read_workers(db: Db, run: str) -> list[WorkerRecord]:
    """Read the workers of a run, with their running attempts."""
    seq = find_run(db, run)
    running = defaultdict[str, list[AttemptId]](list)
    for worker, attempt in db.execute(WORKER_ATTEMPTS, (seq,)):
        running[worker].append(AttemptId(attempt))
    return [
        WorkerRecord(name=name, started=started, seen=seen, due=due, running=tuple(running[name]))
        for name, started, seen, due in db.execute(WORKERS, (seq,))
    ]


def read_counts(db: Db, run: str) -> dict[str, int]:
    """Count the records of a run."""
    seq = find_run(db, run)
    rollouts, attempts, calls, spans = db.execute(COUNTS, (seq,) * 4).fetchone()
    generations, tokens = db.execute(SAMPLED_IN_RUN, (seq,)).fetchone()
    return {
        "rollouts": rollouts,
        "attempts": attempts,
        "calls": calls,
        "spans": spans,
        "generations": generations,
        "sampled_tokens": int(tokens),
    }


class Overview(NamedTuple):
    """Rollouts and workers of all runs, as counts."""

    rollouts: dict[tuple[str, Status], int]
    """By run and status."""
    workers: dict[str, int]
    """Workers whose next heartbeat is not overdue, by run."""


def read_overview(db: Db, now: float) -> Overview:
    """Count rollouts and live workers of all runs."""
    rollouts = db.execute(ROLLOUTS_BY_STATUS)
    return Overview(
        {(run, Status(status)): count for run, status, count in rollouts},
        dict(db.execute(LIVE_WORKERS, (now,))),
    )
