"""Attempts by their ids: whether they run, and why not."""

from collections.abc import Sequence

from whet.errors import LeaseLost, NotFound, StoreError
from whet.store.database import Db
from whet.store.packing import to_json
from whet.types import AttemptId, Status

OF_RUN = "(SELECT seq FROM run WHERE name = ?)"

ATTEMPT = f"SELECT seq, status FROM attempt WHERE run = {OF_RUN} AND id = ?"

ATTEMPTS = f"""
SELECT id, seq, status FROM attempt
WHERE run = {OF_RUN} AND id IN (SELECT value FROM json_each(?) AS asked)
ORDER BY seq /* SHARE */
"""

OUTCOME = f"SELECT reward, failure FROM attempt WHERE run = {OF_RUN} AND id = ?"


def find_attempt(db: Db, run: str, attempt: AttemptId) -> tuple[int, Status]:
    """The row of an attempt, and where it stands. Raises NotFound."""
    row = db.execute(ATTEMPT, (run, attempt)).fetchone()
    if row is None:
        raise _unknown(attempt)
    return row[0], Status(row[1])


def running_attempts(
    db: Db, run: str, attempts: Sequence[AttemptId]
) -> tuple[dict[AttemptId, int], dict[AttemptId, StoreError]]:
    """The rows of those that run, which do not end before the commit, and why others do not."""
    rows: dict[AttemptId, int] = {}
    ended: dict[AttemptId, StoreError] = {}
    asked = list(dict.fromkeys(attempts))
    for id_, seq, status in db.execute(ATTEMPTS, (run, to_json(asked))):
        if status == Status.RUNNING:
            rows[id_] = seq
        else:
            ended[id_] = _ended(id_, status)
    refused = {id_: ended.get(id_) or _unknown(id_) for id_ in asked if id_ not in rows}
    return rows, refused


def why_not_running(db: Db, run: str, attempt: AttemptId) -> StoreError:
    """Why an attempt takes nothing more."""
    try:
        return _ended(attempt, find_attempt(db, run, attempt)[1])
    except NotFound as error:
        return error


def has_ended_so(
    db: Db, run: str, attempt: AttemptId, reward: float | None, failure: str | None
) -> bool:
    """Whether this very outcome ended the attempt."""
    return db.execute(OUTCOME, (run, attempt)).fetchone() == (reward, failure)


def _unknown(attempt: AttemptId) -> NotFound:
    return NotFound(f"there is no attempt {attempt!r}")


def _ended(attempt: AttemptId, status: str) -> LeaseLost:
    return LeaseLost(f"attempt {attempt!r} has ended: {status}")
