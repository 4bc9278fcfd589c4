"""Idempotency keys: a request sent again with the same key is not executed again.

A client that got no answer cannot know whether its request was executed. It sends the request again
with the same key, and gets the result of the first execution.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

from pydantic import JsonValue

from whet.store.codec import to_json
from whet.store.database import Db
from whet.store.queries.tables import insert

T = TypeVar("T")

KEY_TTL_S = 24 * 3600.0
"""How long a key and its result are kept."""

RESULTS = """
SELECT key, result FROM idempotency_key
WHERE run = ? AND key IN (SELECT value FROM json_each(?) AS wanted)
"""

# Of two concurrent requests with one key, the second violates the primary key and starts over.
SAVE = "INSERT INTO idempotency_key (run, key, result, created) VALUES (?, ?, ?, ?)"


def idempotent(change: Callable[[Db], T], run: str, key: str, now: float) -> Callable[[Db], T]:
    """Make a change that is executed at its first call only; its result must be JSON."""

    def change_once(db: Db) -> T:
        known = read_results(db, run, [key])
        if key in known:
            return json.loads(known[key])
        result = change(db)
        save_results(db, run, {key: cast(JsonValue, result)}, now)
        return result

    return change_once


def read_results(db: Db, run: str, keys: Sequence[str]) -> dict[str, str]:
    """Read the saved results of keys, as JSON."""
    return dict(db.execute(RESULTS, (run, to_json(list(keys)))))


def save_results(db: Db, run: str, results: Mapping[str, JsonValue], now: float) -> None:
    """Save results by key, and delete expired ones."""
    insert(db, SAVE, [(run, key, to_json(results[key]), now) for key in sorted(results)])
    db.execute("DELETE FROM idempotency_key WHERE created < ?", (now - KEY_TTL_S,))


def delete_result(db: Db, run: str, key: str) -> None:
    """Forget a key whose change was undone."""
    db.execute("DELETE FROM idempotency_key WHERE run = ? AND key = ?", (run, key))
