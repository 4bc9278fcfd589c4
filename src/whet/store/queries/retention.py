"""Retention of runs: their sizes, pruning and dropping."""

from whet.errors import StoreError
from whet.store.database import Db
from whet.store.queries.tables import find_run
from whet.types import RunSize

# A run without rollouts has only resources and steps, which are small.
SIZES = """
SELECT run.name,
    (SELECT count(*) FROM rollout WHERE rollout.run = run.seq),
    (SELECT count(*) FROM attempt WHERE attempt.run = run.seq),
    (SELECT coalesce(sum(length(body)), 0) FROM rollout WHERE rollout.run = run.seq),
    count(call.seq),
    coalesce(sum(length(call.messages) + length(call.prompt_suffix) + length(call.origin)), 0)
FROM run
LEFT JOIN attempt ON attempt.run = run.seq
LEFT JOIN call ON call.attempt = attempt.seq
GROUP BY run.seq, run.name
ORDER BY run.name
"""

SAMPLED_BYTES = """
SELECT run.name, sum(length(tokens) + length(logprobs) + length(versions) + length(message)
    + length(sampling))
FROM generation
JOIN call ON call.seq = generation.call
JOIN attempt ON attempt.seq = call.attempt
JOIN run ON run.seq = attempt.run
GROUP BY run.name
"""

SPAN_BYTES = """
SELECT run.name, count(*), sum(length(span.body))
FROM span
JOIN attempt ON attempt.seq = span.attempt
JOIN run ON run.seq = attempt.run
GROUP BY run.name
"""

# A failed rollout may be trained, too, with a `failure_reward`.
ENDED_BEFORE = """
SELECT rollout.seq FROM rollout
WHERE run = ? AND pruned = 0 AND status IN ('succeeded', 'failed')
  AND coalesce((SELECT max(ended) FROM attempt WHERE attempt.rollout = rollout.seq), created) < ?
  AND (mode <> 'train' OR EXISTS (
    SELECT 1 FROM consumed WHERE consumed.run = rollout.run AND consumed.rollout = rollout.id))
"""

DELETE_ATTEMPTS = (
    "DELETE FROM generation WHERE call IN"
    " (SELECT call.seq FROM call JOIN attempt ON attempt.seq = call.attempt WHERE {which})",
    "DELETE FROM call WHERE attempt IN (SELECT seq FROM attempt WHERE {which})",
    "DELETE FROM reward WHERE attempt IN (SELECT seq FROM attempt WHERE {which})",
    "DELETE FROM span WHERE attempt IN (SELECT seq FROM attempt WHERE {which})",
)

DELETE_RUN = (
    *(statement.format(which="attempt.run = ?") for statement in DELETE_ATTEMPTS),
    "DELETE FROM late_report WHERE attempt IN (SELECT seq FROM attempt WHERE run = ?)",
    "DELETE FROM consumed WHERE run = ?",
    "DELETE FROM step WHERE run = ?",
    "DELETE FROM attempt WHERE run = ?",
    "DELETE FROM rollout WHERE run = ?",
    "DELETE FROM resource WHERE run = ?",
    "DELETE FROM worker WHERE run = ?",
    "DELETE FROM run WHERE seq = ?",
)


def read_sizes(db: Db) -> dict[str, RunSize]:
    """Return the size of every run."""
    sampled: dict[str, int] = {name: int(total) for name, total in db.execute(SAMPLED_BYTES)}
    spans = {name: (count, int(total)) for name, count, total in db.execute(SPAN_BYTES)}
    return {
        name: RunSize(
            rollouts=rollouts,
            attempts=attempts,
            calls=calls,
            spans=spans.get(name, (0, 0))[0],
            bytes=int(bodies) + int(texts) + sampled.get(name, 0) + spans.get(name, (0, 0))[1],
        )
        for name, rollouts, attempts, bodies, calls, texts in db.execute(SIZES)
    }


def prune(db: Db, run: str, before: float) -> int:
    """Delete calls, rewards and spans of rollouts that ended before a time; returns how many."""
    rows = db.execute(ENDED_BEFORE, (find_run(db, run), before)).fetchall()
    for row in rows:
        for statement in DELETE_ATTEMPTS:
            db.execute(statement.format(which="attempt.rollout = ?"), row)
    db.executemany("UPDATE rollout SET pruned = 1 WHERE seq = ?", rows)
    return len(rows)


def drop(db: Db, run: str) -> None:
    """Delete a run. Raises StoreError while an attempt of it runs."""
    seq = find_run(db, run)
    if db.execute("SELECT 1 FROM rollout WHERE run = ? AND status = 'running'", (seq,)).fetchone():
        raise StoreError(f"run {run!r} has running attempts: cancel its rollouts first")
    for statement in DELETE_RUN:
        db.execute(statement, (seq,))
    db.execute("DELETE FROM idempotency_key WHERE run = ?", (run,))
