"""Queries of the dashboard about whole runs: steps, failures, rewards, evaluations, resources."""

import json
from typing import NamedTuple

from pydantic import JsonValue

from whet.errors import NotFound
from whet.store.codec import to_json
from whet.store.database import Db
from whet.store.queries.tables import find_run
from whet.types import Mode

SAMPLED_BY_ATTEMPT = """
SELECT call.attempt, sum(length(generation.tokens)) / 4
FROM call JOIN generation ON generation.call = call.seq
WHERE call.attempt IN (SELECT CAST(value AS BIGINT) FROM json_each(?) AS wanted)
GROUP BY call.attempt
"""

STEPS_WITH_ROLLOUTS = """
SELECT step.step, step.version, step.checkpoint, step.metrics,
    (SELECT count(*) FROM consumed WHERE consumed.run = step.run AND consumed.step = step.step)
FROM step WHERE step.run = ? AND step.step > ? ORDER BY step.step
"""

COUNTED = ", ".join(f"sum(CASE WHEN mode = '{mode.value}' THEN 1 ELSE 0 END)" for mode in Mode)
STATUSES_BY_MODE = f"SELECT status, {COUNTED} FROM rollout WHERE run = ? GROUP BY status"
"""In the order of an index; by mode and status all rows would be sorted."""

CHANGE_COUNTS = """
SELECT (SELECT max(step) FROM step WHERE run = ?), (SELECT max(seq) FROM attempt),
    (SELECT max(seq) FROM call), (SELECT max(seen) FROM worker WHERE run = ?)
"""

STATUS_COUNTS = "SELECT status, count(*) FROM rollout WHERE run = ? GROUP BY status"

ROLLOUT_BY_ATTEMPT = """
SELECT rollout.id FROM attempt JOIN rollout ON rollout.seq = attempt.rollout
WHERE attempt.run = ? AND attempt.id = ?
"""

FAILURES = """
SELECT rollout.failure, rollout.id, consumed.step FROM rollout
LEFT JOIN consumed ON consumed.run = rollout.run AND consumed.rollout = rollout.id
WHERE rollout.run = ? AND rollout.status = 'failed' ORDER BY rollout.seq DESC LIMIT ?
"""

RETRIED = """
SELECT attempt.failure, count(*) FROM attempt JOIN rollout ON rollout.seq = attempt.rollout
WHERE attempt.run = ? AND attempt.status = 'failed' AND attempt.number < rollout.attempts
GROUP BY attempt.failure ORDER BY count(*) DESC LIMIT ?
"""

REWARDS_BY_STEP = """
SELECT consumed.step, reward.key, count(*), avg(reward.value), avg(reward.value * reward.value),
    min(reward.value), max(reward.value)
FROM consumed
JOIN rollout ON rollout.run = consumed.run AND rollout.id = consumed.rollout
JOIN attempt ON attempt.rollout = rollout.seq AND attempt.number = rollout.attempts
JOIN reward ON reward.attempt = attempt.seq
WHERE consumed.run = ? AND consumed.step >= ?
GROUP BY consumed.step, reward.key ORDER BY consumed.step, reward.key
"""

OUTCOMES = """
SELECT consumed.step, rollout.id, rollout.grp, attempt.reward, attempt.seq
FROM consumed
JOIN rollout ON rollout.run = consumed.run AND rollout.id = consumed.rollout
JOIN attempt ON attempt.rollout = rollout.seq AND attempt.number = rollout.attempts
WHERE consumed.run = ? AND consumed.step >= ? AND attempt.status = 'succeeded'
ORDER BY consumed.step DESC, consumed.position LIMIT ?
"""

EVALUATED = """
SELECT rollout.id, rollout.status, attempt.reward, rollout.failure, rollout.body FROM rollout
LEFT JOIN attempt ON attempt.rollout = rollout.seq AND attempt.number = rollout.attempts
WHERE rollout.run = ? AND rollout.mode = 'val' ORDER BY rollout.seq LIMIT ?
"""

VERSIONS = """
SELECT version, value, created FROM resource WHERE run = ? AND name = ?
ORDER BY version DESC LIMIT ?
"""

RESOURCES = """
SELECT name, max(version), max(created) FROM resource WHERE run = ? GROUP BY name ORDER BY name
"""

RUNNING_WITH_LEASES = """
SELECT attempt.id, attempt.worker, attempt.started, rollout.id, rollout.lease_until
FROM attempt JOIN rollout ON rollout.seq = attempt.rollout
WHERE attempt.run = ? AND attempt.status = 'running' ORDER BY attempt.seq LIMIT ?
"""


class StepRow(NamedTuple):
    """A step without the ids that it consumed."""

    step: int
    version: int
    checkpoint: str
    metrics: dict[str, float]
    rollouts: int


def read_step_rows(db: Db, run: str, after: int) -> list[StepRow]:
    """Read the steps after one, oldest first."""
    rows = db.execute(STEPS_WITH_ROLLOUTS, (find_run(db, run), after))
    return [
        StepRow(step, version, checkpoint, json.loads(metrics), count)
        for step, version, checkpoint, metrics, count in rows
    ]


def read_change_counts(db: Db, run: str) -> dict[str, JsonValue]:
    """Read a few numbers that change whenever something happened in a run."""
    seq = find_run(db, run)
    step, attempt, call, seen = db.execute(CHANGE_COUNTS, (seq, seq)).fetchone()
    statuses: dict[str, JsonValue] = dict(db.execute(STATUS_COUNTS, (seq,)))
    return {"step": step, "attempt": attempt, "call": call, "seen": seen, "rollouts": statuses}


def read_statuses(db: Db, run: str) -> dict[str, dict[str, int]]:
    """Count rollouts by mode and status."""
    found: dict[str, dict[str, int]] = {}
    for status, *counts in db.execute(STATUSES_BY_MODE, (find_run(db, run),)):
        for mode, count in zip(Mode, counts, strict=True):
            if count:
                found.setdefault(mode.value, {})[status] = count
    return found


def read_rollout_id(db: Db, run: str, attempt: str) -> str:
    """Return the id of an attempt's rollout. Raises NotFound."""
    row = db.execute(ROLLOUT_BY_ATTEMPT, (find_run(db, run), attempt)).fetchone()
    if row is None:
        raise NotFound(f"there is no attempt {attempt!r}")
    return row[0]


class FailedRollout(NamedTuple):
    """The failure of a rollout."""

    failure: dict[str, JsonValue]
    id: str
    step: int | None


def read_failed(db: Db, run: str, limit: int) -> list[FailedRollout]:
    """Read the failures of rollouts, the newest first."""
    return [
        FailedRollout(json.loads(failure) if failure else {}, id_, step)
        for failure, id_, step in db.execute(FAILURES, (find_run(db, run), limit))
    ]


def read_retried(db: Db, run: str, limit: int) -> list[tuple[dict[str, JsonValue], int]]:
    """Read the failures of attempts that were followed by another one, with their number."""
    rows = db.execute(RETRIED, (find_run(db, run), limit))
    return [(json.loads(failure) if failure else {}, count) for failure, count in rows]


class RewardRow(NamedTuple):
    """The rewards that a step's rollouts emitted under one key."""

    step: int
    key: str
    rewards: int
    mean: float
    mean_square: float
    min: float
    max: float


def read_rewards(db: Db, run: str, first_step: int) -> list[RewardRow]:
    """Summarize the emitted rewards by step and key."""
    return [RewardRow(*row) for row in db.execute(REWARDS_BY_STEP, (find_run(db, run), first_step))]


class OutcomeRow(NamedTuple):
    """A trained rollout: its reward and the length of its answers."""

    step: int
    id: str
    group: str
    reward: float
    sampled_tokens: int


def read_outcomes(db: Db, run: str, first_step: int, limit: int) -> list[OutcomeRow]:
    """Read rewards and lengths of the rollouts of the last steps."""
    rows = db.execute(OUTCOMES, (find_run(db, run), first_step, limit)).fetchall()
    sampled = dict(db.execute(SAMPLED_BY_ATTEMPT, (to_json([str(row[4]) for row in rows]),)))
    return [
        OutcomeRow(step, id_, group, reward, int(sampled.get(attempt) or 0))
        for step, id_, group, reward, attempt in rows
    ]


class EvaluatedRow(NamedTuple):
    """A rollout of an evaluation."""

    id: str
    status: str
    reward: float | None
    failure: str
    """Kind of its failure, or empty."""
    task: JsonValue


def read_evaluated(db: Db, run: str, limit: int) -> list[EvaluatedRow]:
    """Read the rollouts of evaluations, as enqueued."""
    return [
        EvaluatedRow(
            id=id_,
            status=status,
            reward=reward,
            failure=json.loads(failure)["kind"] if failure else "",
            task=json.loads(body).get("task"),
        )
        for id_, status, reward, failure, body in db.execute(EVALUATED, (find_run(db, run), limit))
    ]


def read_run_names(db: Db, run: str) -> list[str]:
    """Read the names of all runs of the database."""
    return [name for (name,) in db.execute("SELECT name FROM run ORDER BY seq")]


def read_resource_names(db: Db, run: str) -> list[tuple[str, int, float]]:
    """Read name, newest version and its time of every resource."""
    return db.execute(RESOURCES, (find_run(db, run),)).fetchall()


def read_versions(db: Db, run: str, name: str, limit: int) -> list[tuple[int, JsonValue, float]]:
    """Read the versions of a resource, the newest first: number, value, time."""
    rows = db.execute(VERSIONS, (find_run(db, run), name, limit))
    return [(version, json.loads(value), created) for version, value, created in rows]


def read_running(db: Db, run: str, limit: int) -> list[tuple[str, str, float, str, float | None]]:
    """Read running attempts: id, worker, start, rollout, end of the lease."""
    return db.execute(RUNNING_WITH_LEASES, (find_run(db, run), limit)).fetchall()
