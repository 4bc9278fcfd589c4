"""A store with very many rollouts, copied in SQL from a few real ones."""

import sqlite3
from contextlib import closing

from support.runs.recorded_run import record_run
from whet.app.run_folder import RunFolder

NEEDLE = "a needle in the hay"
"""Text of the very first rollout's answer, and of no other."""

COPIES = """
WITH RECURSIVE n (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :count)
"""

ROLLOUTS = f"""{COPIES}
INSERT INTO rollout SELECT 1000 + i, run, printf('many-%06d-%03d', i / 8, i % 8), body, mode,
    printf('many-%06d', i / 8), priority, status, attempts, tries_left, retry_lost, lease_until,
    failure, created + i, pruned
FROM n CROSS JOIN rollout WHERE id = CASE WHEN i % 50 = 7 THEN :failed ELSE :done END
"""

ATTEMPTS = f"""{COPIES}
INSERT INTO attempt SELECT 1000 + i, run, printf('many-%06d-%03d.1', i / 8, i % 8), 1000 + i,
    number, worker, status, CASE WHEN reward IS NULL THEN NULL ELSE (i * 7919 % 1000) / 1000.0 END,
    failure, started, ended, resources
FROM n CROSS JOIN attempt WHERE id = CASE WHEN i % 50 = 7 THEN :failed ELSE :done END || '.1'
"""

CALLS = f"""{COPIES}
INSERT INTO call SELECT 1000 + i, printf('many-%06d', i), 1000 + i, NULL, root, messages,
    prompt_suffix, prompt_length, prompt_digest, created, origin
FROM n CROSS JOIN call WHERE id = :done || '.1-1'
"""

GENERATIONS = f"""{COPIES}
INSERT INTO generation SELECT 1000 + i, 1000 + i, stop, sampling,
    CASE WHEN i = 0 THEN :needle ELSE message END, versions, tokens, logprobs
FROM n CROSS JOIN generation
WHERE call = (SELECT seq FROM call WHERE id = :done || '.1-1')
"""


async def record_many(folder: RunFolder, count: int) -> None:
    """Record a small run, and copies of its rollouts: every fiftieth failed, rewards vary."""
    await record_run(folder, steps=1)
    values = {
        "count": count,
        "done": "train-000000-001",
        "failed": "train-000000-003",
        "needle": f'{{"role": "assistant", "content": "{NEEDLE}"}}',
    }
    with closing(sqlite3.connect(folder.store)) as db, db:
        for statement in (ROLLOUTS, ATTEMPTS, CALLS, GENERATIONS):
            db.execute(statement, values)
