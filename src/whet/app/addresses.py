"""Where a store is, unless somebody says otherwise."""

PORT = 4747
DEFAULT_STORE = f"http://127.0.0.1:{PORT}"
DATABASE = "store.db"
"""What `whet store` keeps everything in, in its `--dir`."""
STORE_VARIABLE = "WHET_STORE"
"""The environment variable that says otherwise, for all processes of a run."""
