"""Commands that go wrong in a sandbox, as `python bad_commands.py NAME`: they print a reward."""

import contextlib
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def write_outside(target: str) -> float:
    try:
        Path(target).write_text("was here")
    except OSError:
        return 0.0
    return 1.0


def fork_without_end(limit: str) -> float:
    """Return how many processes there could be, up to far more than the limit."""
    started = 0
    for _ in range(int(limit) * 4):
        try:
            pid = os.fork()
        except OSError:
            break
        if pid == 0:
            time.sleep(600)
            os._exit(0)
        started += 1
    return started


def fill_disk(megabytes: str) -> float:
    """Return how many megabytes could be written."""
    written = 0
    with contextlib.suppress(OSError):
        for number in range(int(megabytes)):
            Path(f"part-{number}").write_bytes(b"x" * 2**20)
            written += 1
            time.sleep(0.01)
    return written


def call_address(url: str) -> float:
    try:
        urllib.request.urlopen(url, timeout=20)
    except urllib.error.HTTPError:
        return 1.0
    except OSError:
        return 0.0
    return 1.0


def call_gateway() -> float:
    return call_address(os.environ["OPENAI_BASE_URL"] + "/models")


def escape_session(target: str) -> float:
    """Leave a process in a session of its own that writes a file later."""
    if os.fork() == 0:
        os.setsid()
        os.close(1)
        os.close(2)
        time.sleep(3)
        Path(target).write_text("was here")
        os._exit(0)
    return 1.0


def use_memory(megabytes: str) -> float:
    kept = [b"x" * 2**20 for _ in range(int(megabytes))]
    return len(kept)


def show_home() -> float:
    assert Path.cwd() == Path(os.environ["HOME"])
    assert sorted(p.name for p in Path.cwd().iterdir() if not p.name.startswith(".")) in (
        ["task.json"],
        ["gateway.sock", "task.json"],
    )
    assert Path(os.environ["WHET_TASK_FILE"]).read_text().strip() == '"t"'
    Path("mine").write_text("x")
    return 1.0


def look_around(port: str) -> float:
    with socket.socket() as client:
        return float(client.connect_ex(("127.0.0.1", int(port))) == 0)


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    sys.stdout.write(f"{float(globals()[name](*arguments))}\n")
