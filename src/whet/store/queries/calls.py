"""Calls and rewards of attempts, and the trajectories and failures of rollouts."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence

from whet.errors import WhetError
from whet.store.codec import (
    CallRow,
    GenerationRow,
    PackedCall,
    parse_resources,
    parse_rollout,
    to_json,
    unpack_call,
)
from whet.store.database import Db
from whet.store.queries.tables import (
    RUN_BY_NAME,
    build_not_running_error,
    find_attempt,
    find_run,
    find_running_attempts,
    insert,
)
from whet.types import (
    Attempt,
    AttemptId,
    Call,
    Failure,
    Reward,
    Target,
    Trajectory,
)

APPEND_CALL = """
INSERT INTO call
    (attempt, id, parent, root, messages, prompt_suffix, prompt_length, prompt_digest, created,
     origin)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (attempt, id) DO NOTHING
RETURNING seq, attempt, id
"""

APPEND_GENERATION = """
INSERT INTO generation (call, stop, sampling, message, versions, tokens, logprobs)
VALUES (?, ?, ?, ?, ?, ?, ?)
"""

RUNNING_ATTEMPT = f"""
SELECT attempt.number, attempt.resources, rollout.body
FROM attempt JOIN rollout ON rollout.seq = attempt.rollout
WHERE attempt.run = {RUN_BY_NAME} AND attempt.id = ? AND attempt.status = 'running'
"""

# Each order is that of an index: sorting rows with BLOBs would cost more than reading them.
CALLS = """
SELECT call.attempt, attempt.id, call.seq, call.id, call.parent, call.root, call.messages,
    call.prompt_suffix, call.prompt_length, call.prompt_digest, call.created,
    call.origin
FROM call JOIN attempt ON attempt.seq = call.attempt
WHERE call.attempt IN (SELECT CAST(value AS BIGINT) FROM json_each(?) AS wanted)
ORDER BY call.attempt, call.seq
"""

GENERATIONS = """
SELECT call, stop, sampling, message, versions, tokens, logprobs FROM generation
WHERE call IN (
    SELECT seq FROM call
    WHERE attempt IN (SELECT CAST(value AS BIGINT) FROM json_each(?) AS wanted))
ORDER BY call, seq
"""

REWARDS_BY_ATTEMPT = """
SELECT attempt, value, key, target FROM reward
WHERE attempt IN (SELECT CAST(value AS BIGINT) FROM json_each(?) AS wanted)
ORDER BY attempt, seq
"""

ENDED = """
SELECT rollout.body, attempt.seq, attempt.id, attempt.number, attempt.resources, attempt.reward,
    rollout.failure
FROM json_each(?) AS wanted
JOIN rollout ON rollout.run = ? AND rollout.id = wanted.value
JOIN attempt ON attempt.rollout = rollout.seq AND attempt.number = rollout.attempts
WHERE rollout.status IN ('succeeded', ?) AND rollout.pruned = 0
ORDER BY wanted.key
"""

FAILED = """
SELECT rollout.id, rollout.failure
FROM json_each(?) AS wanted
JOIN rollout ON rollout.run = ? AND rollout.id = wanted.value
WHERE rollout.status = 'failed'
"""


def append(db: Db, run: str, calls: Sequence[PackedCall]) -> list[WhetError | None]:
    """Insert calls with their generations; one that is recorded already stays as it is."""
    attempts, refused = find_running_attempts(db, run, [call.attempt for call in calls])
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
        None if call.attempt in attempts or _is_recorded(db, run, call) else refused[call.attempt]
        for call in calls
    ]


def _is_recorded(db: Db, run: str, call: PackedCall) -> bool:
    row = db.execute(
        "SELECT 1 FROM call JOIN attempt ON attempt.seq = call.attempt"
        " WHERE attempt.run = ? AND attempt.id = ? AND call.id = ?",
        (find_run(db, run), call.attempt, call.id),
    ).fetchone()
    return row is not None


def emit(db: Db, run: str, attempt: AttemptId, reward: Reward) -> None:
    """Insert a reward. Raises LeaseLost."""
    rows, refused = find_running_attempts(db, run, [attempt])
    if refused:
        raise refused[attempt]
    target = to_json(reward.target) if reward.target else None
    db.execute(
        "INSERT INTO reward (attempt, value, key, target) VALUES (?, ?, ?, ?)",
        (rows[attempt], reward.value, reward.key, target),
    )


def read_attempt(db: Db, run: str, attempt: AttemptId) -> Attempt:
    """Read a running attempt. Raises LeaseLost."""
    row = db.execute(RUNNING_ATTEMPT, (run, attempt)).fetchone()
    if row is None:
        raise build_not_running_error(db, run, attempt)
    number, resources, body = row
    return Attempt(
        id=attempt, rollout=parse_rollout(body), number=number, resources=parse_resources(resources)
    )


def read_calls(db: Db, run: str, attempt: AttemptId) -> list[Call]:
    """Read the calls of an attempt, running or ended."""
    seq, _ = find_attempt(db, run, attempt)
    return _read_calls(db, [seq])[seq]


def read_trajectories(
    db: Db, run: str, rollouts: Sequence[str], *, failed: bool
) -> list[Trajectory]:
    """Read the trajectories of succeeded, and if asked of `failed` rollouts, in their order."""
    status = "failed" if failed else "succeeded"
    values = (to_json(list(rollouts)), find_run(db, run), status)
    rows = db.execute(ENDED, values).fetchall()
    attempts = list(dict.fromkeys(row[1] for row in rows))
    calls = _read_calls(db, attempts)
    rewards = _read_rewards(db, attempts)
    return [
        Trajectory.unchecked(  # everything in it was validated when it was written
            attempt=Attempt.unchecked(
                id=id_,
                rollout=parse_rollout(body),
                number=number,
                resources=parse_resources(resources),
            ),
            calls=tuple(calls[seq]),
            rewards=tuple(rewards[seq]),
            reward=reward or 0.0,
            failure=Failure.model_validate(json.loads(failure)) if failure else None,
        )
        for body, seq, id_, number, resources, reward, failure in rows
    ]


def read_rewards(db: Db, run: str, attempt: AttemptId) -> list[Reward]:
    """Read the rewards of an attempt, running or ended."""
    seq, _ = find_attempt(db, run, attempt)
    return _read_rewards(db, [seq])[seq]


def read_failures(db: Db, run: str, rollouts: Sequence[str]) -> dict[str, str]:
    """Read `kind: message` of the failed rollouts, by rollout."""
    values = (to_json(list(rollouts)), find_run(db, run))
    rows: Iterable[tuple[str, str]] = db.execute(FAILED, values)
    failures = ((rollout, json.loads(failure)) for rollout, failure in rows)
    return {rollout: f"{failure['kind']}: {failure['message']}" for rollout, failure in failures}


def _read_rewards(db: Db, attempts: Sequence[int]) -> dict[int, list[Reward]]:
    """Read rewards by attempt row, in the order they came."""
    rewards = defaultdict[int, list[Reward]](list)
    for seq, value, key, target in db.execute(REWARDS_BY_ATTEMPT, (to_json(list(attempts)),)):
        parsed = Target.model_validate(json.loads(target)) if target else None
        rewards[seq].append(Reward.unchecked(value=value, key=key, target=parsed))
    return rewards


def _read_calls(db: Db, attempts: Sequence[int]) -> dict[int, list[Call]]:
    """Read calls by attempt row, in the order they were recorded."""
    values = (to_json(list(attempts)),)
    calls: dict[int, list[Call]] = {attempt: [] for attempt in attempts}
    rows = db.execute(CALLS, values).fetchall()
    if not rows:
        return calls
    generations = defaultdict[int, list[GenerationRow]](list)
    for call, *generation in db.execute(GENERATIONS, values):
        generations[call].append(GenerationRow(*generation))
    for seq, attempt, call, id_, *row in rows:
        packed = PackedCall(attempt, id_, CallRow(*row), generations[call])
        calls[seq].append(unpack_call(packed))
    return calls
