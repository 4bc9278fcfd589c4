"""The tables, as migrations: a file knows its version, and opening it brings it up to date."""

import sqlite3
from contextlib import ExitStack
from pathlib import Path

from whet.errors import StoreError
from whet.store.failures import must_be_writable, named

FIRST = (
    """
    CREATE TABLE rollout (
        seq INTEGER PRIMARY KEY,      -- order of insertion
        id TEXT NOT NULL UNIQUE,
        body TEXT NOT NULL,
        status TEXT NOT NULL,
        attempts INTEGER NOT NULL,    -- number of the latest
        tries_left INTEGER NOT NULL,  -- attempts that may still be started
        lease_until REAL              -- of the running attempt
    )
    """,
    "CREATE INDEX rollout_open ON rollout (seq) WHERE status IN ('queued', 'running')",
    "CREATE INDEX rollout_lease ON rollout (lease_until) WHERE status = 'running'",
    """
    CREATE TABLE attempt (
        seq INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        rollout INTEGER NOT NULL REFERENCES rollout (seq),
        number INTEGER NOT NULL,
        worker TEXT NOT NULL,
        status TEXT NOT NULL,
        reward REAL,                  -- of a succeeded one
        failure TEXT,                 -- of a failed one
        started REAL NOT NULL,
        ended REAL
    )
    """,
    "CREATE INDEX attempt_rollout ON attempt (rollout, number)",
    """
    CREATE TABLE call (
        seq INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        attempt INTEGER NOT NULL REFERENCES attempt (seq),
        parent TEXT,
        root TEXT NOT NULL,
        messages TEXT NOT NULL,
        context BLOB NOT NULL,        -- int32 each
        prompt_length INTEGER NOT NULL,
        prompt_digest TEXT NOT NULL,
        created REAL NOT NULL,
        origin TEXT NOT NULL
    )
    """,
    "CREATE INDEX call_attempt ON call (attempt)",
    """
    CREATE TABLE generation (
        seq INTEGER PRIMARY KEY,
        call INTEGER NOT NULL REFERENCES call (seq),
        stop TEXT NOT NULL,
        sampling TEXT NOT NULL,
        message TEXT NOT NULL,
        versions BLOB NOT NULL,       -- int64 pairs: version, how many tokens
        tokens BLOB NOT NULL,         -- int32 each
        logprobs BLOB NOT NULL        -- float64 each
    )
    """,
    "CREATE INDEX generation_call ON generation (call)",
    """
    CREATE TABLE reward (
        seq INTEGER PRIMARY KEY,
        attempt INTEGER NOT NULL REFERENCES attempt (seq),
        key TEXT NOT NULL,
        value REAL NOT NULL
    )
    """,
    "CREATE INDEX reward_attempt ON reward (attempt)",
    """
    CREATE TABLE late_report (        -- outcomes that came after the attempt's end; never trained
        seq INTEGER PRIMARY KEY,
        attempt INTEGER NOT NULL REFERENCES attempt (seq),
        outcome TEXT NOT NULL,
        reported REAL NOT NULL
    )
    """,
    """
    CREATE TABLE step (
        step INTEGER PRIMARY KEY,
        version INTEGER NOT NULL,
        checkpoint TEXT NOT NULL,
        metrics TEXT NOT NULL
    )
    """,
    """
    CREATE TABLE consumed (
        rollout TEXT PRIMARY KEY REFERENCES rollout (id),
        step INTEGER NOT NULL REFERENCES step (step),
        position INTEGER NOT NULL
    )
    """,
    "CREATE INDEX consumed_step ON consumed (step, position)",
)

TABLES = (
    """
    CREATE TABLE run (
        seq INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        created REAL NOT NULL
    )
    """,
    """
    CREATE TABLE rollout (
        seq INTEGER PRIMARY KEY,      -- order of insertion
        run INTEGER NOT NULL REFERENCES run (seq),
        id TEXT NOT NULL,
        body TEXT NOT NULL,
        mode TEXT NOT NULL,
        grp TEXT NOT NULL,
        priority INTEGER NOT NULL,
        status TEXT NOT NULL,
        attempts INTEGER NOT NULL,    -- number of the latest
        tries_left INTEGER NOT NULL,  -- attempts that may still be started
        retry_lost INTEGER NOT NULL,  -- whether it is tried again after its worker died
        lease_until REAL,             -- of the running attempt
        failure TEXT,                 -- of a failed one
        created REAL NOT NULL,
        pruned INTEGER NOT NULL,      -- what was said and sampled in it is forgotten
        UNIQUE (run, id)
    )
    """,
    "CREATE INDEX rollout_queued ON rollout (run, priority DESC, seq) WHERE status = 'queued'",
    "CREATE INDEX rollout_lease ON rollout (lease_until) WHERE status = 'running'",
    "CREATE INDEX rollout_status ON rollout (run, status, seq)",
    "CREATE INDEX rollout_mode ON rollout (run, mode, seq)",
    "CREATE INDEX rollout_group ON rollout (run, grp, seq)",
    """
    CREATE TABLE attempt (
        seq INTEGER PRIMARY KEY,
        run INTEGER NOT NULL REFERENCES run (seq),
        id TEXT NOT NULL,
        rollout INTEGER NOT NULL REFERENCES rollout (seq),
        number INTEGER NOT NULL,
        worker TEXT NOT NULL,
        status TEXT NOT NULL,
        reward REAL,                  -- of a succeeded one
        failure TEXT,                 -- of a failed one
        started REAL NOT NULL,
        ended REAL,
        resources TEXT,               -- versions by name, if it was given any
        UNIQUE (run, id)
    )
    """,
    "CREATE INDEX attempt_rollout ON attempt (rollout, number)",
    "CREATE INDEX attempt_running ON attempt (run, seq) WHERE status = 'running'",
    """
    CREATE TABLE call (
        seq INTEGER PRIMARY KEY,
        id TEXT NOT NULL,
        attempt INTEGER NOT NULL REFERENCES attempt (seq),
        parent TEXT,
        root TEXT NOT NULL,
        messages TEXT NOT NULL,
        context BLOB NOT NULL,        -- int32 each
        prompt_length INTEGER NOT NULL,
        prompt_digest TEXT NOT NULL,
        created REAL NOT NULL,
        origin TEXT NOT NULL,
        UNIQUE (attempt, id)
    )
    """,
    "CREATE INDEX call_attempt ON call (attempt, seq)",
    """
    CREATE TABLE generation (
        seq INTEGER PRIMARY KEY,
        call INTEGER NOT NULL REFERENCES call (seq),
        stop TEXT NOT NULL,
        sampling TEXT NOT NULL,
        message TEXT NOT NULL,
        versions BLOB NOT NULL,       -- int64 pairs: version, how many tokens
        tokens BLOB NOT NULL,         -- int32 each
        logprobs BLOB NOT NULL        -- float64 each
    )
    """,
    "CREATE INDEX generation_call ON generation (call, seq)",
    """
    CREATE TABLE reward (
        seq INTEGER PRIMARY KEY,
        attempt INTEGER NOT NULL REFERENCES attempt (seq),
        key TEXT NOT NULL,
        value REAL NOT NULL
    )
    """,
    "CREATE INDEX reward_attempt ON reward (attempt, seq)",
    """
    CREATE TABLE late_report (        -- outcomes that came after the attempt's end; never trained
        seq INTEGER PRIMARY KEY,
        attempt INTEGER NOT NULL REFERENCES attempt (seq),
        outcome TEXT NOT NULL,
        reported REAL NOT NULL
    )
    """,
    "CREATE INDEX late_report_attempt ON late_report (attempt, seq)",
    """
    CREATE TABLE step (
        run INTEGER NOT NULL REFERENCES run (seq),
        step INTEGER NOT NULL,
        version INTEGER NOT NULL,
        checkpoint TEXT NOT NULL,
        metrics TEXT NOT NULL,
        PRIMARY KEY (run, step)
    )
    """,
    """
    CREATE TABLE consumed (
        run INTEGER NOT NULL,
        rollout TEXT NOT NULL,
        step INTEGER NOT NULL,
        position INTEGER NOT NULL,
        PRIMARY KEY (run, rollout),
        FOREIGN KEY (run, rollout) REFERENCES rollout (run, id),
        FOREIGN KEY (run, step) REFERENCES step (run, step)
    )
    """,
    "CREATE INDEX consumed_step ON consumed (run, step, position)",
    """
    CREATE TABLE resource (
        run INTEGER NOT NULL REFERENCES run (seq),
        name TEXT NOT NULL,
        version INTEGER NOT NULL,
        value TEXT NOT NULL,
        created REAL NOT NULL,
        PRIMARY KEY (run, name, version)
    )
    """,
    """
    CREATE TABLE worker (
        run INTEGER NOT NULL REFERENCES run (seq),
        name TEXT NOT NULL,
        started REAL NOT NULL,        -- first heard of
        seen REAL NOT NULL,           -- last heard of
        due REAL NOT NULL,            -- to be heard of again
        PRIMARY KEY (run, name)
    )
    """,
)
"""The tables as they are; what both databases have in common, in SQLite's words."""

OLD = ("rollout", "attempt", "call", "generation", "reward", "late_report", "step", "consumed")
OLD_INDEXES = (
    "rollout_open",
    "rollout_lease",
    "attempt_rollout",
    "call_attempt",
    "generation_call",
    "reward_attempt",
    "consumed_step",
)

SECOND = (
    *(f"DROP INDEX {index}" for index in OLD_INDEXES),
    *(f"ALTER TABLE {table} RENAME TO old_{table}" for table in OLD),
    *TABLES,
    "INSERT INTO run (name, created) SELECT 'default', 0 WHERE EXISTS (SELECT 1 FROM old_rollout)"
    " OR EXISTS (SELECT 1 FROM old_step)",
    """
    INSERT INTO rollout
    SELECT seq, 1, id, body, json_extract(body, '$.mode'), json_extract(body, '$.group'), 0,
        status, attempts, tries_left, 1, lease_until,
        CASE status WHEN 'failed' THEN (
            SELECT failure FROM old_attempt
            WHERE old_attempt.rollout = old_rollout.seq AND number = attempts) END,
        coalesce((SELECT min(started) FROM old_attempt WHERE rollout = old_rollout.seq), 0), 0
    FROM old_rollout
    """,
    """
    INSERT INTO attempt
    SELECT seq, 1, id, rollout, number, worker, status, reward, failure, started, ended, NULL
    FROM old_attempt
    """,
    "INSERT INTO call SELECT seq, id, attempt, parent, root, messages, context, prompt_length,"
    " prompt_digest, created, origin FROM old_call",
    "INSERT INTO generation SELECT * FROM old_generation",
    "INSERT INTO reward SELECT * FROM old_reward",
    "INSERT INTO late_report SELECT * FROM old_late_report",
    "INSERT INTO step SELECT 1, step, version, checkpoint, metrics FROM old_step",
    "INSERT INTO consumed SELECT 1, rollout, step, position FROM old_consumed",
    *(f"DROP TABLE old_{table}" for table in reversed(OLD)),
)
"""Runs, priorities, resources and workers: what was there becomes the run `default`."""

TICKETS = (
    """
    CREATE TABLE ticket (             -- requests that are done once, and what they gave
        run TEXT NOT NULL,            -- by name: the ticket that drops a run outlives it
        ticket TEXT NOT NULL,
        answer TEXT NOT NULL,
        created REAL NOT NULL,
        PRIMARY KEY (run, ticket)
    )
    """,
    "CREATE INDEX ticket_created ON ticket (created)",
)

TARGETS = ("ALTER TABLE reward ADD COLUMN target TEXT",)
"""What a reward is for; NULL is the attempt."""

SPANS = (
    """
    CREATE TABLE span (
        seq INTEGER PRIMARY KEY,
        attempt INTEGER NOT NULL REFERENCES attempt (seq),
        trace TEXT NOT NULL,
        id TEXT NOT NULL,
        started INTEGER NOT NULL,     -- nanoseconds
        body TEXT NOT NULL,
        UNIQUE (attempt, trace, id)
    )
    """,
    "CREATE INDEX span_started ON span (attempt, started, seq)",
    "CREATE INDEX span_trace ON span (trace)",
)

MIGRATIONS = (FIRST, SECOND, TICKETS, TARGETS, SPANS)
"""The statements that lead from one version to the next; a released one is never edited."""


PAGE_BYTES = 8192
"""Of a new file. A call with its generation is about ten thousand bytes: in pages of SQLite's 4096
it lies in chains of them, and each is written, summed and copied back by itself."""


PATIENCE_S = 30.0
"""How long another process that keeps the file locked is waited for."""


def connect(path: Path) -> sqlite3.Connection:
    """A connection without implicit transactions, that may be handed to another thread."""
    db = sqlite3.connect(path, timeout=PATIENCE_S, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA foreign_keys = ON")
    return db


def open_file(path: Path) -> sqlite3.Connection:
    """A writable connection to a file that is up to date; the file is made if there is none.

    Raises:
        StoreError: it cannot be opened, is not ours, or was written by a newer whet.
    """
    must_be_writable(path)
    with named(path, "cannot open the store"), ExitStack() as undo:
        db = connect(path)
        undo.callback(db.close)
        _prepare(db, path)
        undo.pop_all()
    return db


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    db.execute(f"PRAGMA page_size = {PAGE_BYTES}")  # a file that is there keeps its own
    (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise StoreError(
            f"cannot open the store {str(path)!r}: its file system has no shared memory;"
            " use a local disk"
        )
    # A commit is on disk when it returns, power cut or not: what an agent was told is kept.
    # Group commit shares one fsync among all who wait.
    db.execute("PRAGMA synchronous = FULL")
    migrate(db, path)


def migrate(db: sqlite3.Connection, path: Path) -> None:
    """Bring the tables up to date, in one transaction."""
    db.execute("BEGIN IMMEDIATE")
    try:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if version > len(MIGRATIONS):
            raise StoreError(
                f"the store {str(path)!r} has schema version {version}, this whet knows"
                f" {len(MIGRATIONS)}: upgrade whet"
            )
        if version == 0 and tables:
            raise StoreError(f"{str(path)!r} is a database, but not a store of whet")
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")
