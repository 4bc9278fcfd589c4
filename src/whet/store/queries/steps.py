"""Training steps and the rollouts they consumed."""

import json
from collections import defaultdict
from collections.abc import Mapping

from whet.errors import StoreError
from whet.store.codec import to_json
from whet.store.database import Db
from whet.store.queries.queue import list_unfinished
from whet.store.queries.resources import check_epoch
from whet.store.queries.tables import find_run, make_run
from whet.types import NO_ADVANTAGES, GenerationId, StepRecord

INSERT_STEP = """
INSERT INTO step (run, step, version, checkpoint, metrics, advantages) VALUES (?, ?, ?, ?, ?, ?)
"""

CONSUMED_BEFORE = """
SELECT consumed.rollout, consumed.step
FROM json_each(?) AS wanted
JOIN consumed ON consumed.run = ? AND consumed.rollout = wanted.value LIMIT 1
"""

STEP_PAGE = """
SELECT step, version, checkpoint, metrics FROM step
WHERE run = ? AND step > ? ORDER BY step LIMIT ?
"""

CONSUMED = """
SELECT step, rollout FROM consumed
WHERE run = ? AND step > ? AND step <= ? ORDER BY step, position
"""

NO_LIMIT = 2**62


def commit(
    db: Db,
    run: str,
    record: StepRecord,
    now: float,
    *,
    advantages: Mapping[GenerationId, float] = NO_ADVANTAGES,
    epoch: int | None = None,
) -> None:
    """Insert the next step and what it consumed; inserting the last one again changes nothing.

    Raises:
        LeaseLost: another trainer has taken over.
        StoreError: the step is not the next one, or consumed a rollout that it may not.
    """
    seq = make_run(db, run, now)
    (last,) = db.execute("SELECT max(step) FROM step WHERE run = ?", (seq,)).fetchone()
    expected = 0 if last is None else last + 1
    if record.step == last and _is_committed(db, run, record):
        return
    check_epoch(db, run, seq, epoch)
    if record.step != expected:
        raise StoreError(f"step {record.step} cannot be committed: the next one is {expected}")
    if pending := list_unfinished(db, run, record.consumed):
        raise StoreError(f"step {record.step} consumed {pending[0]!r}, which has not ended")
    if len(set(record.consumed)) < len(record.consumed):
        raise StoreError(f"step {record.step} consumed a rollout twice")
    before = db.execute(CONSUMED_BEFORE, (to_json(list(record.consumed)), seq)).fetchone()
    if before is not None:
        raise StoreError(f"step {record.step} consumed {before[0]!r}, as step {before[1]} did")
    db.execute(
        INSERT_STEP,
        (
            seq,
            record.step,
            record.version,
            record.checkpoint,
            json.dumps(record.metrics),
            json.dumps(dict(advantages)),
        ),
    )
    db.executemany(
        "INSERT INTO consumed (run, rollout, step, position) VALUES (?, ?, ?, ?)",
        [(seq, rollout, record.step, position) for position, rollout in enumerate(record.consumed)],
    )


def _is_committed(db: Db, run: str, record: StepRecord) -> bool:
    """Compare with the recorded step, as JSON, where a NaN is equal to itself."""
    return [to_json(known) for known in read_steps(db, run, record.step - 1, 1)] == [
        to_json(record)
    ]


def read_steps(db: Db, run: str, after: int, limit: int | None) -> list[StepRecord]:
    """Read the steps after one, oldest first."""
    seq = find_run(db, run)
    most = NO_LIMIT if limit is None else limit
    rows = db.execute(STEP_PAGE, (seq, after, most)).fetchall()
    last = rows[-1][0] if rows else after
    consumed = defaultdict[int, list[str]](list)
    for step, rollout in db.execute(CONSUMED, (seq, after, last)):
        consumed[step].append(rollout)
    return [
        StepRecord(
            step=step,
            version=version,
            checkpoint=checkpoint,
            consumed=tuple(consumed[step]),
            metrics=json.loads(metrics),
        )
        for step, version, checkpoint, metrics in rows
    ]


def read_advantages(db: Db, run: str, step: int) -> dict[GenerationId, float]:
    """Read the advantages of a step, by generation."""
    query = "SELECT advantages FROM step WHERE run = ? AND step = ?"
    row = db.execute(query, (find_run(db, run), step)).fetchone()
    return json.loads(row[0]) if row else {}
