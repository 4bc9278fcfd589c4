"""Requests that are done once, however often they are asked.

Whoever asks over a network cannot know whether a request that got no answer was done. It asks
again with the same ticket: what was done with it is not done again, and has the same answer.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

from pydantic import JsonValue

from whet.store.database import Db, insert
from whet.store.packing import to_json

T = TypeVar("T")

KEPT_S = 24 * 3600.0
"""Nobody asks again after this long."""

RECALL = """
SELECT ticket, answer FROM ticket
WHERE run = ? AND ticket IN (SELECT value FROM json_each(?) AS asked)
"""

# Two at once with one ticket: the second is refused by the key, and begins again.
REMEMBER = "INSERT INTO ticket (run, ticket, answer, created) VALUES (?, ?, ?, ?)"


def once(change: Callable[[Db], T], run: str, ticket: str, now: float) -> Callable[[Db], T]:
    """A change that is done at the first time only; its answer is JSON."""

    def act(db: Db) -> T:
        known = recall(db, run, [ticket])
        if ticket in known:
            return json.loads(known[ticket])
        answer = change(db)
        remember(db, run, {ticket: cast(JsonValue, answer)}, now)
        return answer

    return act


def recall(db: Db, run: str, tickets: Sequence[str]) -> dict[str, str]:
    """The answers tickets got, as JSON; a new one is absent."""
    if not tickets:
        return {}
    return dict(db.execute(RECALL, (run, to_json(list(tickets)))))


def remember(db: Db, run: str, answers: Mapping[str, JsonValue], now: float) -> None:
    """Keep answers for whoever asks again, and forget what nobody asks for any more."""
    if answers:
        insert(db, REMEMBER, [(run, key, to_json(answers[key]), now) for key in sorted(answers)])
        db.execute("DELETE FROM ticket WHERE created < ?", (now - KEPT_S,))


def forget(db: Db, run: str, ticket: str) -> None:
    """What was done with the ticket was undone."""
    db.execute("DELETE FROM ticket WHERE run = ? AND ticket = ?", (run, ticket))
