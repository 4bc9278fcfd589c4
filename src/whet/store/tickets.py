"""Requests that are done once, however often they are asked.

Whoever asks over a network cannot know whether a request that got no answer was done. It asks
again with the same ticket: what was done with it is not done again, and has the same answer.
"""

import json
from collections.abc import Callable
from typing import TypeVar, cast

from pydantic import JsonValue

from whet.store.database import Db
from whet.store.packing import to_json

T = TypeVar("T")

KEPT_S = 24 * 3600.0
"""Nobody asks again after this long."""

REMEMBER = """
INSERT INTO ticket (run, ticket, answer, created) VALUES (?, ?, ?, ?)
ON CONFLICT (run, ticket) DO UPDATE SET answer = excluded.answer
"""


def once(change: Callable[[Db], T], run: str, ticket: str, now: float) -> Callable[[Db], T]:
    """A change that is done at the first time only; its answer is JSON."""

    def act(db: Db) -> T:
        row = recall(db, run, ticket)
        if row is not None:
            return json.loads(row)
        answer = change(db)
        remember(db, run, ticket, cast(JsonValue, answer), now)
        return answer

    return act


def recall(db: Db, run: str, ticket: str) -> str | None:
    """The answer a ticket got, as JSON; None for a new one."""
    row = db.execute(
        "SELECT answer FROM ticket WHERE run = ? AND ticket = ?", (run, ticket)
    ).fetchone()
    return None if row is None else row[0]


def remember(db: Db, run: str, ticket: str, answer: JsonValue, now: float) -> None:
    """Keep the answer for whoever asks again, and forget what nobody asks for any more."""
    db.execute(REMEMBER, (run, ticket, to_json(answer), now))
    db.execute("DELETE FROM ticket WHERE created < ?", (now - KEPT_S,))


def forget(db: Db, run: str, ticket: str) -> None:
    """What was done with the ticket was undone."""
    db.execute("DELETE FROM ticket WHERE run = ? AND ticket = ?", (run, ticket))
