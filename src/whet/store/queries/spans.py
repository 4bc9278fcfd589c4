"""OpenTelemetry spans of attempts, recorded once by their ids, also after the attempt ended."""

import json
from collections.abc import Sequence

from whet.store.codec import to_json
from whet.store.database import Db
from whet.store.queries.tables import find_attempt, find_run, insert
from whet.types import AttemptId, Span

INSERT_SPAN = """
INSERT INTO span (attempt, trace, id, started, body)
VALUES (?, ?, ?, ?, ?)
ON CONFLICT (attempt, trace, id) DO NOTHING
"""

SPANS = "SELECT body FROM span WHERE attempt = ? ORDER BY started, seq"

TRACE_OWNERS = """
SELECT span.trace, min(attempt.id)
FROM span JOIN attempt ON attempt.seq = span.attempt
WHERE attempt.run = ? AND span.trace IN (SELECT value FROM json_each(?) AS wanted)
GROUP BY span.trace HAVING count(DISTINCT attempt.seq) = 1
"""


def insert_spans(db: Db, run: str, attempt: AttemptId, spans: Sequence[Span]) -> None:
    """Insert spans; one that is recorded already stays as it is."""
    seq, _ = find_attempt(db, run, attempt)
    rows = [(seq, span.trace_id, span.span_id, span.start, to_json(span)) for span in spans]
    insert(db, INSERT_SPAN, rows)


def read_spans(db: Db, run: str, attempt: AttemptId) -> list[Span]:
    """Read the spans of an attempt, running or ended."""
    seq, _ = find_attempt(db, run, attempt)
    return [Span.model_validate(json.loads(body)) for (body,) in db.execute(SPANS, (seq,))]


def read_owners(db: Db, run: str, ids: Sequence[str]) -> dict[str, AttemptId]:
    """Read the attempt of each trace, for traces with spans of exactly one attempt."""
    return dict(db.execute(TRACE_OWNERS, (find_run(db, run), to_json(list(ids)))))
