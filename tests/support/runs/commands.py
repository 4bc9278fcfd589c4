"""Examples at work as their users start them."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"


def run(script: str, *arguments: str, python: str | Path = sys.executable) -> str:
    """Run a script of the examples to its end, and return its output."""
    done = subprocess.run(
        [python, EXAMPLES / script, *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@contextmanager
def at_work(
    script: str, *arguments: str, python: str | Path = sys.executable, log: Path
) -> Generator[subprocess.Popen[bytes]]:
    """A process that is stopped at the end of the block."""
    with log.open("w") as out:
        process = subprocess.Popen(
            [python, EXAMPLES / script, *arguments],
            env=environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def report(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "runs" / name / "report.json").read_text())


def free_store() -> str:
    """The URL of a store on a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"
