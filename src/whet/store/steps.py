"""Training steps and what they consumed, as changes to run inside a transaction."""

import json
import sqlite3
from collections import defaultdict

from whet.errors import StoreError
from whet.store.packing import to_json
from whet.store.queue import unfinished
from whet.types import StepRecord

TAKEN = """
SELECT consumed.rollout, consumed.step
FROM json_each(?) AS asked JOIN consumed ON consumed.rollout = asked.value LIMIT 1
"""


def commit(db: sqlite3.Connection, record: StepRecord) -> None:
    """Write a step and what it consumed, or nothing."""
    (last,) = db.execute("SELECT max(step) FROM step").fetchone()
    expected = 0 if last is None else last + 1
    if record.step != expected:
        raise StoreError(f"step {record.step} cannot be committed: the next one is {expected}")
    if pending := unfinished(db, record.consumed):
        raise StoreError(f"step {record.step} consumed {pending[0]!r}, which has not ended")
    if len(set(record.consumed)) < len(record.consumed):
        raise StoreError(f"step {record.step} consumed a rollout twice")
    taken = db.execute(TAKEN, (to_json(list(record.consumed)),)).fetchone()
    if taken is not None:
        raise StoreError(f"step {record.step} consumed {taken[0]!r}, as step {taken[1]} did")
    db.execute(
        "INSERT INTO step (step, version, checkpoint, metrics) VALUES (?, ?, ?, ?)",
        (record.step, record.version, record.checkpoint, json.dumps(record.metrics)),
    )
    db.executemany(
        "INSERT INTO consumed (rollout, step, position) VALUES (?, ?, ?)",
        [(rollout, record.step, position) for position, rollout in enumerate(record.consumed)],
    )


def read_steps(db: sqlite3.Connection) -> list[StepRecord]:
    """All steps, oldest first."""
    consumed = defaultdict[int, list[str]](list)
    for step, rollout in db.execute("SELECT step, rollout FROM consumed ORDER BY step, position"):
        consumed[step].append(rollout)
    return [
        StepRecord(
            step=step,
            version=version,
            checkpoint=checkpoint,
            consumed=tuple(consumed[step]),
            metrics=json.loads(metrics),
        )
        for step, version, checkpoint, metrics in db.execute(
            "SELECT step, version, checkpoint, metrics FROM step ORDER BY step"
        )
    ]
