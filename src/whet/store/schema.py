"""The tables, and the version of their schema: a store of another version is refused."""

from whet.errors import StoreError

VERSION = 8
"""Also of what the columns hold."""

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
        retry_lost INTEGER NOT NULL,  -- whether it is retried after a lost worker
        lease_until REAL,             -- of the running attempt
        failure TEXT,                 -- of a failed one
        created REAL NOT NULL,
        pruned INTEGER NOT NULL,      -- its calls, rewards and spans are deleted
        UNIQUE (run, id)
    )
    """,
    "CREATE INDEX rollout_queued ON rollout (run, priority DESC, seq) WHERE status = 'queued'",
    "CREATE INDEX rollout_lease ON rollout (lease_until) WHERE status = 'running'",
    "CREATE INDEX rollout_run ON rollout (run, seq)",
    "CREATE INDEX rollout_status ON rollout (run, status, seq, mode)",
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
        resources TEXT,               -- versions by name, if it uses any
        UNIQUE (run, id)
    )
    """,
    "CREATE INDEX attempt_rollout ON attempt (rollout, number)",
    "CREATE INDEX attempt_reward ON attempt (run, status, reward, rollout)",
    "CREATE INDEX attempt_running ON attempt (run, seq) WHERE status = 'running'",
    """
    CREATE TABLE call (
        seq INTEGER PRIMARY KEY,
        id TEXT NOT NULL,
        attempt INTEGER NOT NULL REFERENCES attempt (seq),
        parent TEXT,
        root TEXT NOT NULL,
        messages TEXT NOT NULL,
        prompt_suffix BLOB NOT NULL,  -- int32 each
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
        value REAL NOT NULL,
        target TEXT                   -- what it is for; NULL is the attempt
    )
    """,
    "CREATE INDEX reward_attempt ON reward (attempt, seq)",
    """
    CREATE TABLE late_report (        -- outcomes reported after the end; never trained
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
        advantages TEXT NOT NULL,     -- by generation; read by themselves
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
        started REAL NOT NULL,        -- first claim
        seen REAL NOT NULL,           -- last claim or heartbeat
        due REAL NOT NULL,            -- when the next one is due
        PRIMARY KEY (run, name)
    )
    """,
    """
    CREATE TABLE idempotency_key (
        run TEXT NOT NULL,            -- by name: the key that dropped a run outlives it
        key TEXT NOT NULL,
        result TEXT NOT NULL,         -- of its request
        created REAL NOT NULL,
        PRIMARY KEY (run, key)
    )
    """,
    "CREATE INDEX idempotency_key_created ON idempotency_key (created)",
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
"""All tables, in the SQL that both databases understand."""


def check_version(store: str, found: int) -> None:
    """Raise StoreError if the tables of a store are of another version."""
    if found != VERSION:
        raise StoreError(
            f"store {store!r} has schema version {found}, expected {VERSION}: open it with the"
            " version of whet that wrote it, or start a new run in another store"
        )
