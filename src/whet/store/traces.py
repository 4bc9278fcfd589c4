"""Spans of attempts: kept as they came, each once, also when the attempt has ended."""

import json
from collections.abc import Sequence

from whet.store.attempts import find_attempt
from whet.store.database import Db, insert
from whet.store.packing import to_json
from whet.store.runs import find_run
from whet.types import AttemptId, Span

RECORD = """
INSERT INTO span (attempt, trace, id, started, body)
VALUES (?, ?, ?, ?, ?)
ON CONFLICT (attempt, trace, id) DO NOTHING
"""

SPANS = "SELECT body FROM span WHERE attempt = ? ORDER BY started, seq"

OF_TRACES = """
SELECT span.trace, min(attempt.id)
FROM span JOIN attempt ON attempt.seq = span.attempt
WHERE attempt.run = ? AND span.trace IN (SELECT value FROM json_each(?) AS asked)
GROUP BY span.trace HAVING count(DISTINCT attempt.seq) = 1
"""


def record(db: Db, run: str, attempt: AttemptId, spans: Sequence[Span]) -> None:
    """Write spans; one that is known already stays as it is."""
    seq, _ = find_attempt(db, run, attempt)
    rows = [(seq, span.trace_id, span.span_id, span.start, to_json(span)) for span in spans]
    insert(db, RECORD, rows)


def read_spans(db: Db, run: str, attempt: AttemptId) -> list[Span]:
    """The spans of one attempt, running or ended."""
    seq, _ = find_attempt(db, run, attempt)
    return [Span.model_validate(json.loads(body)) for (body,) in db.execute(SPANS, (seq,))]


def read_owners(db: Db, run: str, ids: Sequence[str]) -> dict[str, AttemptId]:
    """Whose traces these are, by trace; those of several attempts, or of none, are left out."""
    return dict(db.execute(OF_TRACES, (find_run(db, run), to_json(list(ids)))))
