"""Environments of other packages: one training step and one evaluation each, rows proven.

$WHET_ENVIRONMENTS names the folder of their environments: `make test-environments` installs them.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from whet.io.http_client import HttpClient, TransportError

HOME = Path(os.environ.get("WHET_ENVIRONMENTS", "."))
SERVED = Path(__file__).parent / "served"
ROOT = Path(__file__).parents[3]
ONE_DIGIT = "min_terms=2&max_terms=2&min_digits=1&max_digits=1&max_tokens=8"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "WHET_ENVIRONMENTS" not in os.environ, reason="run `make test-environments`"
    ),
]


def whet(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a command of whet and return the JSON object it prints last."""
    path = os.pathsep.join([str(ROOT / "src"), str(SERVED)])
    ended = subprocess.run(
        [sys.executable, "-m", "whet", *arguments, "--json", "--quiet"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


def check(folder: Path, name: str, package: str, group: int = 2) -> None:
    """Train one step, of groups of so many rollouts, and evaluate."""
    python = HOME / package / "bin" / "python"
    env = ("--env", f"{name}{'&' if '?' in name else '?'}tasks=4&held_out=2")
    env += ("--env-python", str(python), "--runner.concurrency", "4")
    small = ("--tasks-per-step=2", f"--group-size={group}", "--steps=1", "--trainer.weights=full")
    small += ("--evaluation.samples=0", "--algorithm.name=positive", "--name=run")
    trained = whet(folder, "train", *env, "--model=tiny", *small)
    assert (trained["steps"], trained["failed_rollouts"], trained["unproven_generations"]) == (
        1,
        0,
        0,
    )
    assert trained["calls"] >= 4
    assert trained["tasks"] == 2
    evaluated = whet(folder, "eval", *env, "--model=tiny", "--evaluation.samples=0")
    [scores] = evaluated["models"].values() if "tiny" in evaluated["models"] else [None]
    assert scores is not None or evaluated["tasks"] == 2


def test_reasoning_gym(tmp_path: Path) -> None:
    # Most answers are wrong, and a step in which all are trains nothing.
    check(tmp_path, f"reasoning-gym:products?{ONE_DIGIT}", "reasoning-gym", group=16)


def test_verifiers(tmp_path: Path) -> None:
    check(tmp_path, "verifiers:echo-taskset", "verifiers")


def test_inspect(tmp_path: Path) -> None:
    check(tmp_path, f"inspect:{SERVED / 'inspect_echo.py'}@vowels", "inspect")


@pytest.fixture
def server() -> Generator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    python = HOME / "openenv" / "bin" / "python"
    command = [str(python), str(SERVED / "openenv_echo.py"), str(port)]
    with subprocess.Popen(command) as process:
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    import anyio

    async def poll() -> None:
        async with HttpClient() as http:
            while process.poll() is None:
                try:
                    await http.request("GET", url, timeout_s=5)
                except TransportError:
                    await anyio.sleep(0.5)
                else:
                    return
            raise AssertionError("the server ended")

    anyio.run(poll)


def test_openenv(tmp_path: Path, server: str) -> None:
    check(tmp_path, f"openenv:{server}?action=message&observation=prompt&max_tokens=8", "openenv")
