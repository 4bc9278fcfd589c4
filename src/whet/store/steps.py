"""Training steps and what they consumed, as changes to run inside a transaction."""

import json
from collections import defaultdict

from whet.errors import StoreError
from whet.store.database import Db
from whet.store.packing import to_json
from whet.store.queue import unfinished
from whet.store.runs import find_run, make_run
from whet.types import StepRecord

TAKEN = """
SELECT consumed.rollout, consumed.step
FROM json_each(?) AS asked
JOIN consumed ON consumed.run = ? AND consumed.rollout = asked.value LIMIT 1
"""

STEPS = """
SELECT step, version, checkpoint, metrics FROM step
WHERE run = ? AND step > ? ORDER BY step LIMIT ?
"""

CONSUMED = """
SELECT step, rollout FROM consumed
WHERE run = ? AND step > ? AND step <= ? ORDER BY step, position
"""

NO_LIMIT = 2**62


def commit(db: Db, run: str, record: StepRecord, now: float) -> None:
    """Write a step and what it consumed, or nothing; the very last one again changes nothing."""
    seq = make_run(db, run, now)
    (last,) = db.execute("SELECT max(step) FROM step WHERE run = ?", (seq,)).fetchone()
    expected = 0 if last is None else last + 1
    if record.step == last and _is_committed(db, run, record):
        return
    if record.step != expected:
        raise StoreError(f"step {record.step} cannot be committed: the next one is {expected}")
    if pending := unfinished(db, run, record.consumed):
        raise StoreError(f"step {record.step} consumed {pending[0]!r}, which has not ended")
    if len(set(record.consumed)) < len(record.consumed):
        raise StoreError(f"step {record.step} consumed a rollout twice")
    taken = db.execute(TAKEN, (to_json(list(record.consumed)), seq)).fetchone()
    if taken is not None:
        raise StoreError(f"step {record.step} consumed {taken[0]!r}, as step {taken[1]} did")
    db.execute(
        "INSERT INTO step (run, step, version, checkpoint, metrics) VALUES (?, ?, ?, ?, ?)",
        (seq, record.step, record.version, record.checkpoint, json.dumps(record.metrics)),
    )
    db.executemany(
        "INSERT INTO consumed (run, rollout, step, position) VALUES (?, ?, ?, ?)",
        [(seq, rollout, record.step, position) for position, rollout in enumerate(record.consumed)],
    )


def _is_committed(db: Db, run: str, record: StepRecord) -> bool:
    """Whether this very record is there; as JSON, where a NaN is equal to itself."""
    return [to_json(known) for known in read_steps(db, run, record.step - 1, 1)] == [
        to_json(record)
    ]


def read_steps(db: Db, run: str, after: int, limit: int | None) -> list[StepRecord]:
    """Steps after one, oldest first."""
    seq = find_run(db, run)
    most = NO_LIMIT if limit is None else limit
    rows = db.execute(STEPS, (seq, after, most)).fetchall()
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
