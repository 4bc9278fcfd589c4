"""Calls and rewards of attempts: written once, read back in few queries.

What is read was checked when it was written, so it is built without being checked again.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence

from whet.errors import WhetError
from whet.store.attempts import OF_RUN, find_attempt, running_attempts, why_not_running
from whet.store.database import Db, insert
from whet.store.packed import (
    CallRow,
    GenerationRow,
    PackedCall,
    PackedTrajectory,
    parse_resources,
    parse_rollout,
)
from whet.store.packing import to_json
from whet.store.runs import find_run
from whet.types import (
    Attempt,
    AttemptId,
    Reward,
    Target,
)

APPEND_CALL = """
INSERT INTO call
    (attempt, id, parent, root, messages, context, prompt_length, prompt_digest, created,
     origin)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (attempt, id) DO NOTHING
RETURNING seq, attempt, id
"""

APPEND_GENERATION = """
INSERT INTO generation (call, stop, sampling, message, versions, tokens, logprobs)
VALUES (?, ?, ?, ?, ?, ?, ?)
"""

RUNNING = f"""
SELECT attempt.number, attempt.resources, rollout.body
FROM attempt JOIN rollout ON rollout.seq = attempt.rollout
WHERE attempt.run = {OF_RUN} AND attempt.id = ? AND attempt.status = 'running'
"""

# Each order is that of an index: sorting rows with BLOBs would cost more than reading them.
CALLS = """
SELECT call.attempt, attempt.id, call.seq, call.id, call.parent, call.root, call.messages,
    call.context, call.prompt_length, call.prompt_digest, call.created,
    call.origin
FROM call JOIN attempt ON attempt.seq = call.attempt
WHERE call.attempt IN (SELECT CAST(value AS BIGINT) FROM json_each(?) AS asked)
ORDER BY call.attempt, call.seq
"""

GENERATIONS = """
SELECT call, stop, sampling, message, versions, tokens, logprobs FROM generation
WHERE call IN (
    SELECT seq FROM call
    WHERE attempt IN (SELECT CAST(value AS BIGINT) FROM json_each(?) AS asked))
ORDER BY call, seq
"""

REWARDS = """
SELECT attempt, value, key, target FROM reward
WHERE attempt IN (SELECT CAST(value AS BIGINT) FROM json_each(?) AS asked)
ORDER BY attempt, seq
"""

SUCCEEDED = """
SELECT rollout.body, attempt.seq, attempt.id, attempt.number, attempt.resources, attempt.reward
FROM json_each(?) AS asked
JOIN rollout ON rollout.run = ? AND rollout.id = asked.value
JOIN attempt ON attempt.rollout = rollout.seq AND attempt.number = rollout.attempts
WHERE rollout.status = 'succeeded' AND rollout.pruned = 0
ORDER BY asked.key
"""

FAILED = """
SELECT rollout.id, rollout.failure
FROM json_each(?) AS asked
JOIN rollout ON rollout.run = ? AND rollout.id = asked.value
WHERE rollout.status = 'failed'
"""


def append(db: Db, run: str, calls: Sequence[PackedCall]) -> list[WhetError | None]:
    """Write calls with their generations; one that is known already stays as it is."""
    attempts, refused = running_attempts(db, run, [call.attempt for call in calls])
    new: dict[tuple[int, str], PackedCall] = {}
    for call in calls:
        if call.attempt in attempts:
            new.setdefault((attempts[call.attempt], call.id), call)
    rows = [(attempt, id_, *call.row) for (attempt, id_), call in new.items()]
    generations = [
        (seq, *generation)
        for seq, attempt, id_ in insert(db, APPEND_CALL, rows)
        for generation in new[attempt, id_].generations
    ]
    insert(db, APPEND_GENERATION, generations)
    return [
        None if call.attempt in attempts or _is_known(db, run, call) else refused[call.attempt]
        for call in calls
    ]


def _is_known(db: Db, run: str, call: PackedCall) -> bool:
    row = db.execute(
        "SELECT 1 FROM call JOIN attempt ON attempt.seq = call.attempt"
        " WHERE attempt.run = ? AND attempt.id = ? AND call.id = ?",
        (find_run(db, run), call.attempt, call.id),
    ).fetchone()
    return row is not None


def emit(db: Db, run: str, attempt: AttemptId, reward: Reward) -> None:
    """Write a reward."""
    rows, refused = running_attempts(db, run, [attempt])
    if refused:
        raise refused[attempt]
    target = to_json(reward.target) if reward.target else None
    db.execute(
        "INSERT INTO reward (attempt, value, key, target) VALUES (?, ?, ?, ?)",
        (rows[attempt], reward.value, reward.key, target),
    )


def read_attempt(db: Db, run: str, attempt: AttemptId) -> Attempt:
    """A running attempt."""
    row = db.execute(RUNNING, (run, attempt)).fetchone()
    if row is None:
        raise why_not_running(db, run, attempt)
    number, given, body = row
    return Attempt(
        id=attempt, rollout=parse_rollout(body), number=number, resources=parse_resources(given)
    )


def read_calls(db: Db, run: str, attempt: AttemptId) -> list[PackedCall]:
    """The calls of one attempt, running or ended."""
    seq, _ = find_attempt(db, run, attempt)
    return _calls(db, [seq])[seq]


def read_trajectories(db: Db, run: str, rollouts: Sequence[str]) -> list[PackedTrajectory]:
    """The succeeded among the rollouts, in the order asked."""
    rows = db.execute(SUCCEEDED, (to_json(list(rollouts)), find_run(db, run))).fetchall()
    attempts = list(dict.fromkeys(row[1] for row in rows))
    calls = _calls(db, attempts)
    rewards = _rewards(db, attempts)
    return [
        PackedTrajectory(id_, number, body, given, reward, rewards[seq], calls[seq])
        for body, seq, id_, number, given, reward in rows
    ]


def read_rewards(db: Db, run: str, attempt: AttemptId) -> list[Reward]:
    """The rewards of one attempt, running or ended."""
    seq, _ = find_attempt(db, run, attempt)
    return _rewards(db, [seq])[seq]


def read_failures(db: Db, run: str, rollouts: Sequence[str]) -> dict[str, str]:
    """`kind: message` of the failed among the rollouts."""
    asked = (to_json(list(rollouts)), find_run(db, run))
    rows: Iterable[tuple[str, str]] = db.execute(FAILED, asked)
    failures = ((rollout, json.loads(failure)) for rollout, failure in rows)
    return {rollout: f"{failure['kind']}: {failure['message']}" for rollout, failure in failures}


def _rewards(db: Db, attempts: Sequence[int]) -> dict[int, list[Reward]]:
    """The rewards of these attempts by attempt, in the order they came."""
    rewards = defaultdict[int, list[Reward]](list)
    for seq, value, key, target in db.execute(REWARDS, (to_json(list(attempts)),)):
        meant = Target.model_validate_json(target) if target else None
        rewards[seq].append(Reward.unchecked(value=value, key=key, target=meant))
    return rewards


def _calls(db: Db, attempts: Sequence[int]) -> dict[int, list[PackedCall]]:
    """The calls of these attempts by attempt, in the order they were recorded."""
    asked = (to_json(list(attempts)),)
    calls: dict[int, list[PackedCall]] = {attempt: [] for attempt in attempts}
    rows = db.execute(CALLS, asked).fetchall()
    if not rows:
        return calls
    generations = defaultdict[int, list[GenerationRow]](list)
    for call, *generation in db.execute(GENERATIONS, asked):
        generations[call].append(GenerationRow(*generation))
    for seq, attempt, call, id_, *row in rows:
        calls[seq].append(PackedCall(attempt, id_, CallRow(*row), generations[call]))
    return calls
