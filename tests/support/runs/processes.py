"""Commands as processes, watched by their output."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


class Command:
    """A `whet` command at work."""

    def __init__(self, cwd: Path, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "whet", *arguments],
            cwd=cwd,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A suite started in the background ignores Ctrl-C, and its children would too.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def hears(self, text: str, timeout: float = 300) -> str:
        """The first line with the text, once it comes."""

        def found() -> str | None:
            return next((line for line in self.lines if text in line), None)

        with self._news:
            deadline = time.monotonic() + timeout
            while (line := found()) is None:
                left = deadline - time.monotonic()
                assert self._reader.is_alive(), f"ended without {text!r}: {self.lines}"
                assert left > 0, f"{text!r} not in {self.lines}"
                self._news.wait(min(left, 1))
            return line

    def ends(self, timeout: float = 300) -> int:
        """Its exit code."""
        code = self.process.wait(timeout)
        self._reader.join(10)
        return code

    def stop(self, timeout: float = 60) -> int:
        self.process.terminate()
        return self.ends(timeout)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self._news:
                    self.lines.append(line.rstrip("\n"))
                    self._news.notify_all()
        with self._news:
            self._news.notify_all()


@contextmanager
def start(cwd: Path, *arguments: str, **environment: str) -> Generator[Command]:
    """A command at work; killed at the end of the block if it still is."""
    command = Command(cwd, *arguments, **environment)
    try:
        yield command
    finally:
        command.process.kill()
        command.ends()


def find_gateways(parent: int) -> list[int]:
    """The gateway processes that a process has started."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, ppid, *_ = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(ppid) == parent and state != "Z" and b"gateway_worker" in command:
            found.append(int(stat.parent.name))
    return sorted(found)
