"""Reads for people who look at a run: filtered pages, summaries by group, failures, rewards."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import JsonValue

from whet.errors import NotFound
from whet.store.codec import to_json
from whet.store.database import Column, Db
from whet.store.queries.tables import find_run

Order = Literal["newest", "oldest", "best", "worst"]

ROLLOUTS = """
SELECT rollout.seq, rollout.id, rollout.status, rollout.mode, rollout.grp, rollout.attempts,
    rollout.created, rollout.failure, rollout.body, rollout.pruned, attempt.seq, attempt.reward,
    attempt.started, attempt.ended, consumed.step
FROM rollout
LEFT JOIN attempt ON attempt.rollout = rollout.seq AND attempt.number = rollout.attempts
LEFT JOIN consumed ON consumed.run = rollout.run AND consumed.rollout = rollout.id
WHERE rollout.run = ?
"""

COUNT = "SELECT count(*) FROM rollout"

OF_ATTEMPT = """
LEFT JOIN attempt ON attempt.rollout = rollout.seq AND attempt.number = rollout.attempts
"""

OF_STEP = "LEFT JOIN consumed ON consumed.run = rollout.run AND consumed.rollout = rollout.id"

CALLS = """
SELECT call.attempt, count(*), sum(CASE WHEN instr(call.origin, ?) > 0 THEN 1 ELSE 0 END)
FROM call WHERE call.attempt IN (SELECT CAST(value AS BIGINT) FROM json_each(?) AS wanted)
GROUP BY call.attempt
"""

SAMPLED = """
SELECT call.attempt, sum(length(generation.tokens)) / 4
FROM call JOIN generation ON generation.call = call.seq
WHERE call.attempt IN (SELECT CAST(value AS BIGINT) FROM json_each(?) AS wanted)
GROUP BY call.attempt
"""

TEXT = """(
    instr(lower(rollout.body), ?) > 0 OR instr(lower(rollout.failure), ?) > 0 OR EXISTS (
        SELECT 1 FROM call JOIN generation ON generation.call = call.seq
        WHERE call.attempt = attempt.seq
            AND (instr(lower(call.messages), ?) > 0 OR instr(lower(generation.message), ?) > 0)))"""

OF_CALL = """EXISTS (
    SELECT 1 FROM call WHERE call.attempt = attempt.seq AND instr(call.origin, ?) > 0)"""

GROUPS = """
SELECT rollout.grp, min(rollout.seq), count(*),
    sum(CASE WHEN rollout.status = 'failed' THEN 1 ELSE 0 END),
    count(attempt.reward), avg(attempt.reward), min(attempt.reward), max(attempt.reward),
    min(consumed.step)
FROM rollout
LEFT JOIN attempt ON attempt.rollout = rollout.seq AND attempt.number = rollout.attempts
    AND attempt.status = 'succeeded'
LEFT JOIN consumed ON consumed.run = rollout.run AND consumed.rollout = rollout.id
WHERE rollout.run = ? AND rollout.mode = ?
"""

FIRST_BODIES = """
SELECT seq, body FROM rollout
WHERE seq IN (SELECT CAST(value AS BIGINT) FROM json_each(?) AS wanted)
"""

STEPS = """
SELECT step.step, step.version, step.checkpoint, step.metrics,
    (SELECT count(*) FROM consumed WHERE consumed.run = step.run AND consumed.step = step.step)
FROM step WHERE step.run = ? AND step.step > ? ORDER BY step.step
"""

STATUSES = "SELECT mode, status, count(*) FROM rollout WHERE run = ? GROUP BY mode, status"

PULSE = """
SELECT (SELECT max(step) FROM step WHERE run = ?), (SELECT max(seq) FROM attempt),
    (SELECT max(seq) FROM call), (SELECT max(seen) FROM worker WHERE run = ?)
"""

BY_STATUS = "SELECT status, count(*) FROM rollout WHERE run = ? GROUP BY status"

ROLLOUT_OF = """
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
WHERE rollout.run = ? AND attempt.status = 'failed' AND attempt.number < rollout.attempts
GROUP BY attempt.failure ORDER BY count(*) DESC LIMIT ?
"""

REWARDS = """
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

RUNNING = """
SELECT attempt.id, attempt.worker, attempt.started, rollout.id, rollout.lease_until
FROM attempt JOIN rollout ON rollout.seq = attempt.rollout
WHERE attempt.run = ? AND attempt.status = 'running' ORDER BY attempt.seq LIMIT ?
"""

FORKED = '"fork":"'
"""Part of the origin of a call that forked."""


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """Conditions on rollouts; absent ones are None."""

    status: str | None = None
    mode: str | None = None
    group: str | None = None
    step: int | None = None
    agent: str | None = None
    text: str | None = None
    """Part of the task, a message, an answer or a failure, in any case."""
    min_reward: float | None = None
    max_reward: float | None = None
    forked: bool = False
    """Only rollouts with a call that forked."""


class RolloutRow(NamedTuple):
    """A rollout in a list, with totals of its last attempt."""

    seq: int
    id: str
    status: str
    mode: str
    group: str
    attempts: int
    created: float
    failure: dict[str, JsonValue] | None
    task: JsonValue
    pruned: bool
    reward: float | None
    seconds: float | None
    step: int | None
    """From 0 on; None if no step has consumed it."""
    calls: int
    forks: int
    sampled_tokens: int


class PageCursor(NamedTuple):
    """The last row of a page: the next one begins after it."""

    seq: int
    reward: float | None = None


def read_page(
    db: Db,
    run: str,
    where: RolloutFilter,
    *,
    order: Order = "newest",
    after: PageCursor | None = None,
    limit: int = 50,
) -> list[RolloutRow]:
    """Read a page of rollouts."""
    values: list[Column] = [find_run(db, run)]
    sql = ROLLOUTS + _conditions(where, values)
    if order in ("newest", "oldest") and not (where.status or where.mode or where.group):
        # In the order of the rows: by an index of the run all of them would be sorted first.
        sql = sql.replace("rollout.run = ?", "rollout.run + 0 = ?", 1)
    if order in ("best", "worst"):
        # A failed rollout has no reward; it is neither among the best nor among the worst.
        sql += " AND rollout.status = 'succeeded'"
    sql += _after(order, after, values)
    by = {
        "newest": "rollout.seq DESC",
        "oldest": "rollout.seq",
        "best": "attempt.reward DESC, rollout.seq",
        "worst": "attempt.reward, rollout.seq",
    }[order]
    rows = db.execute(f"{sql} ORDER BY {by} LIMIT ?", (*values, limit)).fetchall()
    attempts = to_json([str(row[10]) for row in rows if row[10] is not None])
    calls = {seq: (count, forks) for seq, count, forks in db.execute(CALLS, (FORKED, attempts))}
    sampled = dict(db.execute(SAMPLED, (attempts,)))
    return [_row(row, calls.get(row[10], (0, 0)), sampled.get(row[10], 0)) for row in rows]


def count_page(db: Db, run: str, where: RolloutFilter) -> int:
    """Count the rollouts that a filter leaves."""
    values: list[Column] = [find_run(db, run)]
    conditions = _conditions(where, values)
    # A join costs more than the count itself.
    joins = OF_ATTEMPT * ("attempt." in conditions) + OF_STEP * ("consumed." in conditions)
    sql = f"{COUNT} {joins} WHERE rollout.run = ?{conditions}"
    return db.execute(sql, values).fetchone()[0]


def read_rollout(db: Db, run: str, id: str) -> RolloutRow:
    """Read one rollout. Raises NotFound."""
    sql = f"{ROLLOUTS} AND rollout.id = ?"
    row = db.execute(sql, (find_run(db, run), id)).fetchone()
    if row is None:
        raise NotFound(f"there is no rollout {id!r}")
    return _row(row, (0, 0), 0)


def _conditions(where: RolloutFilter, values: list[Column]) -> str:
    sql = ""
    for column, value in (
        ("rollout.status = ?", where.status),
        ("rollout.mode = ?", where.mode),
        ("rollout.grp = ?", where.group),
        ("consumed.step = ?", where.step),
        ("attempt.reward >= ?", where.min_reward),
        ("attempt.reward <= ?", where.max_reward),
    ):
        if value is not None:
            sql += f" AND {column}"
            values.append(value)
    if where.agent is not None:
        sql += f" AND {OF_CALL}"
        values.append(f'"agent":{json.dumps(where.agent, ensure_ascii=False)}')
    if where.forked:
        sql += f" AND {OF_CALL}"
        values.append(FORKED)
    if where.text:
        sql += f" AND {TEXT}"
        # Texts are stored as JSON, in which quotes and line ends are escaped.
        values += [json.dumps(where.text, ensure_ascii=False)[1:-1].lower()] * 4
    return sql


def _after(order: Order, after: PageCursor | None, values: list[Column]) -> str:
    if after is None:
        return ""
    if order in ("newest", "oldest"):
        values.append(after.seq)
        return f" AND rollout.seq {'<' if order == 'newest' else '>'} ?"
    values += [after.reward, after.reward, after.seq]
    sign = "<" if order == "best" else ">"
    return f" AND (attempt.reward {sign} ? OR (attempt.reward = ? AND rollout.seq > ?))"


def _row(row: Sequence[object], calls: tuple[int, int], sampled: int) -> RolloutRow:
    seq, id_, status, mode, group, attempts, created, failure, body, pruned, _, reward = row[:12]
    started, ended, step = row[12:]
    assert isinstance(seq, int)
    return RolloutRow(
        seq=seq,
        id=str(id_),
        status=str(status),
        mode=str(mode),
        group=str(group),
        attempts=int(str(attempts)),
        created=float(str(created)),
        failure=json.loads(str(failure)) if failure else None,
        task=json.loads(str(body)).get("task"),
        pruned=bool(pruned),
        reward=reward if status == "succeeded" and isinstance(reward, float | int) else None,
        seconds=float(str(ended)) - float(str(started)) if ended and started else None,
        step=step if isinstance(step, int) else None,
        calls=calls[0],
        forks=int(calls[1] or 0),
        sampled_tokens=int(sampled or 0),
    )


class GroupRow(NamedTuple):
    """The rollouts of a group as numbers."""

    group: str
    seq: int
    rollouts: int
    failed: int
    succeeded: int
    mean: float | None
    min: float | None
    max: float | None
    step: int | None
    task: JsonValue


def read_groups(
    db: Db, run: str, *, mode: str, step: int | None, before: int | None, limit: int
) -> list[GroupRow]:
    """Read a page of groups, the newest first."""
    values: list[Column] = [find_run(db, run), mode]
    sql = GROUPS
    if step is not None:
        sql += " AND consumed.step = ?"
        values.append(step)
    sql += " GROUP BY rollout.grp"
    if before is not None:
        sql += " HAVING min(rollout.seq) < ?"
        values.append(before)
    sql += " ORDER BY min(rollout.seq) DESC LIMIT ?"
    rows = db.execute(sql, (*values, limit)).fetchall()
    bodies = dict(db.execute(FIRST_BODIES, (to_json([str(row[1]) for row in rows]),)))
    return [GroupRow(*row, task=json.loads(bodies[row[1]]).get("task")) for row in rows]


class StepRow(NamedTuple):
    """A step without the ids that it consumed."""

    step: int
    version: int
    checkpoint: str
    metrics: dict[str, float]
    rollouts: int


def read_step_rows(db: Db, run: str, after: int) -> list[StepRow]:
    """Read the steps after one, oldest first."""
    rows = db.execute(STEPS, (find_run(db, run), after))
    return [
        StepRow(step, version, checkpoint, json.loads(metrics), count)
        for step, version, checkpoint, metrics, count in rows
    ]


def read_pulse(db: Db, run: str) -> dict[str, JsonValue]:
    """Read a few numbers that change whenever something happened in a run."""
    seq = find_run(db, run)
    step, attempt, call, seen = db.execute(PULSE, (seq, seq)).fetchone()
    statuses: dict[str, JsonValue] = dict(db.execute(BY_STATUS, (seq,)))
    return {"step": step, "attempt": attempt, "call": call, "seen": seen, "rollouts": statuses}


def read_statuses(db: Db, run: str) -> dict[str, dict[str, int]]:
    """Count rollouts by mode and status."""
    found: dict[str, dict[str, int]] = {}
    for mode, status, count in db.execute(STATUSES, (find_run(db, run),)):
        found.setdefault(mode, {})[status] = count
    return found


def find_rollout(db: Db, run: str, attempt: str) -> str:
    """Return the id of an attempt's rollout. Raises NotFound."""
    row = db.execute(ROLLOUT_OF, (find_run(db, run), attempt)).fetchone()
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
    return [RewardRow(*row) for row in db.execute(REWARDS, (find_run(db, run), first_step))]


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
    sampled = dict(db.execute(SAMPLED, (to_json([str(row[4]) for row in rows]),)))
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
    return db.execute(RUNNING, (find_run(db, run), limit)).fetchall()
