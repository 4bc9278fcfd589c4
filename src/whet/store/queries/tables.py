"""Shared access to the tables: check names, find runs and attempts by them, insert many rows."""

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from pydantic import TypeAdapter, ValidationError

from whet.errors import LeaseLost, NotFound, StoreError
from whet.store.codec import to_json
from whet.store.database import Column, Db
from whet.types import AttemptId, Name, Status

MAX_ROWS = 64
"""Rows that one statement inserts at most."""

NO_RUN = -1
"""The row of a run that nothing was written to yet."""

RUN_BY_NAME = "(SELECT seq FROM run WHERE name = ?)"

ATTEMPT = f"SELECT seq, status FROM attempt WHERE run = {RUN_BY_NAME} AND id = ?"

ATTEMPTS = f"""
SELECT id, seq, status FROM attempt
WHERE run = {RUN_BY_NAME} AND id IN (SELECT value FROM json_each(?) AS wanted)
"""
LOCKED_ATTEMPTS = f"{ATTEMPTS} ORDER BY seq /* SHARE */"


_NAME = TypeAdapter[str](Name)


def check_name(name: str) -> str:
    """Return the name of a run or a resource. Raises StoreError if it is invalid."""
    try:
        return _NAME.validate_python(name)
    except ValidationError as error:
        raise StoreError(error.errors()[0]["msg"].removeprefix("Value error, ")) from error


def find_run(db: Db, name: str) -> int:
    """Return the row of a run, or `NO_RUN`."""
    row = db.execute("SELECT seq FROM run WHERE name = ?", (name,)).fetchone()
    return NO_RUN if row is None else row[0]


def make_run(db: Db, name: str, now: float) -> int:
    """Return the row of a run; creates it."""
    run = find_run(db, name)
    if run == NO_RUN:
        db.execute(
            "INSERT INTO run (name, created) VALUES (?, ?) ON CONFLICT (name) DO NOTHING",
            (name, now),
        )
        run = find_run(db, name)
    return run


def find_rollout(db: Db, run: int, rollout: str) -> int:
    """Return the row of a rollout. Raises NotFound."""
    row = db.execute("SELECT seq FROM rollout WHERE run = ? AND id = ?", (run, rollout)).fetchone()
    if row is None:
        raise NotFound(f"there is no rollout {rollout!r}")
    return row[0]


def find_attempt(db: Db, run: str, attempt: AttemptId) -> tuple[int, Status]:
    """Return the row of an attempt and its status. Raises NotFound."""
    row = db.execute(ATTEMPT, (run, attempt)).fetchone()
    if row is None:
        raise _build_unknown_error(attempt)
    return row[0], Status(row[1])


def find_statuses(db: Db, run: str, attempts: Sequence[AttemptId]) -> list[Status | StoreError]:
    """Return the status of each attempt; NotFound for an unknown one."""
    rows = db.execute(ATTEMPTS, (run, to_json(list(attempts)))).fetchall()
    found = {id_: Status(status) for id_, _, status in rows}
    return [found.get(attempt) or _build_unknown_error(attempt) for attempt in attempts]


def find_running_attempts(
    db: Db, run: str, attempts: Sequence[AttemptId]
) -> tuple[dict[AttemptId, int], dict[AttemptId, StoreError]]:
    """Return the rows of running attempts, locked until the commit, and errors for the others."""
    rows: dict[AttemptId, int] = {}
    ended: dict[AttemptId, StoreError] = {}
    wanted = list(dict.fromkeys(attempts))
    for id_, seq, status in db.execute(LOCKED_ATTEMPTS, (run, to_json(wanted))):
        if status == Status.RUNNING:
            rows[id_] = seq
        else:
            ended[id_] = _build_ended_error(id_, status)
    refused = {
        id_: ended.get(id_) or _build_unknown_error(id_) for id_ in wanted if id_ not in rows
    }
    return rows, refused


def build_not_running_error(db: Db, run: str, attempt: AttemptId) -> StoreError:
    """The error for a change to an attempt that does not run: LeaseLost or NotFound."""
    try:
        return _build_ended_error(attempt, find_attempt(db, run, attempt)[1])
    except NotFound as error:
        return error


def _build_unknown_error(attempt: AttemptId) -> NotFound:
    return NotFound(f"there is no attempt {attempt!r}")


def _build_ended_error(attempt: AttemptId, status: str) -> LeaseLost:
    return LeaseLost(f"attempt {attempt!r} has ended: {status}")


def insert(db: Db, sql: str, rows: Sequence[tuple[Column, ...]]) -> list[Any]:  # Any: see Cursor
    """Insert rows by an INSERT of one row, and return its RETURNING rows.

    Statements insert 1, 2, 4 ... rows each, so that few different ones have to be prepared.
    """
    returned: list[Any] = []
    first = 0
    while first < len(rows):
        count = min(MAX_ROWS, 1 << (len(rows) - first).bit_length() - 1)
        values = list(chain.from_iterable(rows[first : first + count]))
        result = db.execute(_repeat_row(sql, count), values)
        if "RETURNING" in sql:
            returned += result.fetchall()
        first += count
    return returned


@lru_cache(256)
def _repeat_row(sql: str, count: int) -> str:
    """Rewrite an INSERT of one row as one of several."""
    return re.sub(
        r"VALUES (\([^)]*\))", lambda row: "VALUES " + ", ".join([row[1]] * count), sql, count=1
    )
