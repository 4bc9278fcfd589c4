"""Paged queries of rollouts and groups for the dashboard, filtered and sorted by indexes.

A page is read in two steps: an index gives candidates in the wanted order, in ever larger parts,
and those that meet all conditions are kept. What no index knows, such as a text, is searched for a
limited time; the page then ends early, and its cursor continues the search.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import JsonValue

from whet.store.codec import to_json
from whet.store.database import Column, Db
from whet.store.queries.browse import SAMPLED_BY_ATTEMPT
from whet.store.queries.tables import find_rollout, find_run

Order = Literal["newest", "oldest", "best", "worst"]

SEARCH_S = 0.1
"""Seconds after which a page ends with what was found."""
PART_S = 0.02
"""Seconds that a part may take; larger ones follow while it takes less."""
MAX_PART = 4096
"""Candidates of one part."""

JOIN_ATTEMPT = """
LEFT JOIN attempt ON attempt.rollout = rollout.seq AND attempt.number = rollout.attempts
"""

JOIN_STEP = "LEFT JOIN consumed ON consumed.run = rollout.run AND consumed.rollout = rollout.id"

FROM_STEP = """
consumed JOIN rollout ON rollout.run = consumed.run AND rollout.id = consumed.rollout
"""

WANTED = "(SELECT CAST(value AS BIGINT) FROM json_each(?) AS wanted)"

ROLLOUTS = f"""
SELECT rollout.seq, rollout.id, rollout.status, rollout.mode, rollout.grp, rollout.attempts,
    rollout.created, rollout.failure, rollout.body, rollout.pruned, attempt.seq, attempt.reward,
    attempt.started, attempt.ended, consumed.step
FROM rollout {JOIN_ATTEMPT} {JOIN_STEP}
"""

CALL_COUNTS = f"""
SELECT call.attempt, count(*), sum(CASE WHEN instr(call.origin, ?) > 0 THEN 1 ELSE 0 END)
FROM call WHERE call.attempt IN {WANTED} GROUP BY call.attempt
"""

TEXT = """(
    instr(lower(rollout.body /* ASCII */), ?) > 0
    OR instr(lower(rollout.failure /* ASCII */), ?) > 0
    OR EXISTS (
        SELECT 1 FROM call JOIN generation ON generation.call = call.seq
        WHERE call.attempt = attempt.seq
            AND (instr(lower(call.messages /* ASCII */), ?) > 0
                OR instr(lower(generation.message /* ASCII */), ?) > 0)))"""

HAS_CALL = """EXISTS (
    SELECT 1 FROM call WHERE call.attempt = attempt.seq AND instr(call.origin, ?) > 0)"""

FORKED = '"fork":"'
"""Part of the origin of a call that forked."""

NEWEST_GROUPS = """
SELECT seq, grp FROM rollout WHERE run = ? AND mode = ? AND seq < ? ORDER BY seq DESC LIMIT ?
"""

GROUPS_OF_STEP = f"""
SELECT DISTINCT rollout.grp FROM {FROM_STEP} WHERE consumed.run = ? AND consumed.step = ?
"""

GROUPS = f"""
SELECT rollout.grp, min(rollout.seq), count(*),
    sum(CASE WHEN rollout.status = 'failed' THEN 1 ELSE 0 END),
    count(attempt.reward), avg(attempt.reward), min(attempt.reward), max(attempt.reward),
    min(consumed.step)
FROM rollout
LEFT JOIN attempt ON attempt.rollout = rollout.seq AND attempt.number = rollout.attempts
    AND attempt.status = 'succeeded'
{JOIN_STEP}
WHERE rollout.run = ? AND rollout.mode = ?
    AND rollout.grp IN (SELECT value FROM json_each(?) AS wanted)
GROUP BY rollout.grp
"""

FIRST_BODIES = f"SELECT seq, body FROM rollout WHERE seq IN {WANTED}"


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """Conditions on rollouts; absent ones are None."""

    status: str | None = None
    mode: str | None = None
    group: str | None = None
    step: int | None = None
    agent: str | None = None
    policy: str | None = None
    text: str | None = None
    """Part of the task, a message, an answer or a failure; ASCII letters match in any case."""
    task: JsonValue = None
    """The whole task."""
    min_reward: float | None = None
    max_reward: float | None = None
    forked: bool = False
    """Only rollouts with a call that forked."""

    @property
    def has_reward(self) -> bool:
        """Whether only some rewards are wanted."""
        return self.min_reward is not None or self.max_reward is not None

    @property
    def is_searched(self) -> bool:
        """Whether there is a condition that no index knows."""
        wanted = (self.agent, self.policy, self.task)
        return bool(self.text or self.forked or any(each is not None for each in wanted))


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


class Page(NamedTuple):
    """Rollouts in order."""

    rows: list[RolloutRow]
    next: PageCursor | None
    """Where the next page begins; None if there is none."""
    searched: int
    """Number of candidates that were checked."""


def read_page(
    db: Db,
    run: str,
    where: RolloutFilter,
    *,
    order: Order = "newest",
    after: PageCursor | None = None,
    limit: int = 50,
    search_s: float = SEARCH_S,
) -> Page:
    """Read a page of rollouts; it ends early if the search takes longer than `search_s`."""
    seq, began = find_run(db, run), time.monotonic()
    found: list[PageCursor] = []
    searched, part = 0, limit + 1
    while True:
        part_began = time.monotonic()
        candidates = _read_candidates(db, seq, where, order, after, part)
        kept = _check(db, where, candidates)
        for each in candidates:
            if each.seq in kept and len(found) == limit:  # one more than the page has
                return Page(_read_rows(db, found), after, searched)
            searched, after = searched + 1, each
            found += [each] if each.seq in kept else []
        if len(candidates) < part:
            return Page(_read_rows(db, found), None, searched)
        if time.monotonic() - began >= search_s:
            return Page(_read_rows(db, found), after, searched)
        if time.monotonic() - part_began < PART_S:
            part = min(2 * part, MAX_PART)


def _read_candidates(
    db: Db, run: int, where: RolloutFilter, order: Order, after: PageCursor | None, limit: int
) -> list[PageCursor]:
    """Read rollouts by the index that fits best, in order; not all of them meet the filter."""
    by_reward = order in ("best", "worst")
    if (by_reward or where.has_reward) and where.status not in (None, "succeeded"):
        return []  # only what succeeded has a reward
    values: list[Column] = [run]
    seq, join = "rollout.seq", ""
    if by_reward:
        join = " JOIN attempt ON attempt.rollout = rollout.seq AND attempt.status = 'succeeded'"
    if where.step is not None:
        sql = f"{FROM_STEP}{join} WHERE consumed.run = ? AND consumed.step = ?"
        values.append(where.step)
    elif where.group is not None:
        sql = f"rollout{join} WHERE rollout.run = ? AND rollout.grp = ?"
        values.append(where.group)
    elif by_reward or where.has_reward:
        seq = "attempt.rollout"
        sql = "attempt WHERE attempt.run = ? AND attempt.status = 'succeeded'"
        sql += _build_reward_filter(where, values)
    else:
        sql = "rollout WHERE rollout.run = ?"
        for column, value in (("status", where.status), ("mode", where.mode)):
            if value is not None:
                sql += f" AND rollout.{column} = ?"
                values.append(value)
    columns = ("attempt.reward", seq) if by_reward else (seq,)
    is_falling = order in ("newest", "best")
    if after is not None:
        sql += f" AND ({', '.join(columns)}) {'<' if is_falling else '>'} "
        sql += "(?, ?)" if by_reward else "(?)"
        values += [after.reward, after.seq] if by_reward else [after.seq]
    # Those of a step or a group are few: sorting them is faster than an index of this order.
    is_small = where.step is not None or where.group is not None
    sorted_by = [f"{column} + 0" if is_small else column for column in columns]
    by = ", ".join(f"{column} DESC" if is_falling else column for column in sorted_by)
    sql = f"SELECT {seq}, {columns[0]} FROM {sql} ORDER BY {by} LIMIT ?"
    rows = db.execute(sql, (*values, limit))
    return [PageCursor(seq, reward if by_reward else None) for seq, reward in rows]


def _build_reward_filter(where: RolloutFilter, values: list[Column]) -> str:
    sql = ""
    for condition, value in ((">=", where.min_reward), ("<=", where.max_reward)):
        if value is not None:
            sql += f" AND attempt.reward {condition} ?"
            values.append(value)
    return sql


def _check(db: Db, where: RolloutFilter, candidates: Sequence[PageCursor]) -> set[int]:
    """Return the rows that meet all conditions."""
    values: list[Column] = [to_json([str(each.seq) for each in candidates])]
    conditions = _build_conditions(where, values)
    if not conditions:
        return {each.seq for each in candidates}
    # A join costs more than most conditions.
    joins = JOIN_ATTEMPT * ("attempt." in conditions) + JOIN_STEP * ("consumed." in conditions)
    sql = f"SELECT rollout.seq FROM rollout {joins} WHERE rollout.seq IN {WANTED}{conditions}"
    return {seq for (seq,) in db.execute(sql, values)}


def _build_conditions(where: RolloutFilter, values: list[Column]) -> str:
    sql = ""
    for column, value in (
        ("rollout.status", where.status),
        ("rollout.mode", where.mode),
        ("rollout.grp", where.group),
        ("consumed.step", where.step),
    ):
        if value is not None:
            sql += f" AND {column} = ?"
            values.append(value)
    if where.has_reward:
        sql += " AND attempt.status = 'succeeded'" + _build_reward_filter(where, values)
    for key, name in (("agent", where.agent), ("policy", where.policy)):
        if name is not None:
            sql += f" AND {HAS_CALL}"
            values.append(f'"{key}":{json.dumps(name, ensure_ascii=False)}')
    if where.forked:
        sql += f" AND {HAS_CALL}"
        values.append(FORKED)
    if where.task is not None:
        sql += " AND instr(rollout.body, ?) > 0"
        values.append(f'"task":{to_json(where.task)},"group":')
    if where.text:
        sql += f" AND {TEXT}"
        lower = "".join(char.lower() if char.isascii() else char for char in where.text)
        # Texts are stored as JSON, in which quotes and line ends are escaped, in tasks and
        # failures everything that is not ASCII too.
        values += [json.dumps(lower)[1:-1]] * 2
        values += [json.dumps(lower, ensure_ascii=False)[1:-1]] * 2
    return sql


def count_page(db: Db, run: str, where: RolloutFilter, order: Order) -> int | None:
    """Count the rollouts of all pages; None if that would take a search."""
    values: list[Column] = [find_run(db, run)]
    by_reward = order in ("best", "worst") or where.has_reward
    is_small = where.step is not None or where.group is not None
    if where.is_searched or (by_reward and (where.status or where.mode) and not is_small):
        return None
    if by_reward and not is_small:
        sql = "SELECT count(*) FROM attempt WHERE attempt.run = ? AND attempt.status = 'succeeded'"
        return db.execute(sql + _build_reward_filter(where, values), values).fetchone()[0]
    conditions = _build_conditions(where, values)
    if by_reward:
        conditions += " AND rollout.status = 'succeeded'"
    sql = f"rollout {JOIN_ATTEMPT if where.has_reward else ''} WHERE rollout.run = ?{conditions}"
    if where.step is not None:
        sql = f"{FROM_STEP} {sql.removeprefix('rollout')}"
    return db.execute(f"SELECT count(*) FROM {sql}", values).fetchone()[0]


def read_rollout(db: Db, run: str, id: str) -> RolloutRow:
    """Read one rollout. Raises NotFound."""
    seq = find_rollout(db, find_run(db, run), id)
    [found] = _read_rows(db, [PageCursor(seq)])
    return found


def _read_rows(db: Db, found: Sequence[PageCursor]) -> list[RolloutRow]:
    """Read rollouts with the totals of their last attempts, in this order."""
    wanted = to_json([str(each.seq) for each in found])
    rows = {
        row[0]: row for row in db.execute(f"{ROLLOUTS} WHERE rollout.seq IN {WANTED}", (wanted,))
    }
    attempts = to_json([str(row[10]) for row in rows.values() if row[10] is not None])
    calls = {
        seq: (count, forks) for seq, count, forks in db.execute(CALL_COUNTS, (FORKED, attempts))
    }
    sampled = dict(db.execute(SAMPLED_BY_ATTEMPT, (attempts,)))
    return [
        _build_row(row, *calls.get(row[10], (0, 0)), sampled.get(row[10], 0))
        for row in (rows[each.seq] for each in found)
    ]


def _build_row(row: Sequence[Any], calls: int, forks: int, sampled: int) -> RolloutRow:
    # Any: columns have the types of their tables
    seq, id_, status, mode, group, attempts, created, failure, body, pruned, _, reward = row[:12]
    started, ended, step = row[12:]
    return RolloutRow(
        seq=seq,
        id=id_,
        status=status,
        mode=mode,
        group=group,
        attempts=attempts,
        created=created,
        failure=json.loads(failure) if failure else None,
        task=json.loads(body)["task"],
        pruned=bool(pruned),
        reward=reward if status == "succeeded" else None,
        seconds=None if started is None or ended is None else ended - started,
        step=step,
        calls=calls,
        forks=int(forks),
        sampled_tokens=int(sampled),
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
    """Read a page of groups, the newest first; those of a step are one page."""
    seq = find_run(db, run)
    if step is None:
        names = _read_group_names(db, seq, mode, before, limit)
    else:
        names = [name for (name,) in db.execute(GROUPS_OF_STEP, (seq, step))]
    rows = db.execute(GROUPS, (seq, mode, to_json(names))).fetchall()
    rows = [row for row in rows if before is None or row[1] < before]
    rows = sorted(rows, key=lambda row: -row[1])[:limit]
    bodies = dict(db.execute(FIRST_BODIES, (to_json([str(row[1]) for row in rows]),)))
    return [GroupRow(*row, task=json.loads(bodies[row[1]]).get("task")) for row in rows]


def _read_group_names(
    db: Db, run: int, mode: str, before: int | None, limit: int
) -> list[JsonValue]:
    """Return the groups of the newest rollouts: those of a group are enqueued together."""
    names: dict[JsonValue, None] = {}
    last = 2**62 if before is None else before
    while len(names) < limit:
        rows = db.execute(NEWEST_GROUPS, (run, mode, last, MAX_PART)).fetchall()
        for seq, name in rows:
            last = seq
            names.setdefault(name)
            if len(names) == limit:
                break
        if len(rows) < MAX_PART:
            break
    return list(names)
