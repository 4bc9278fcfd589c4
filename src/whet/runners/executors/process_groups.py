"""Kills the process groups of commands whose runner is gone, even if it was killed.

The program at the end runs beside the runner. Its stdin closes with the runner's death; before, it
gets `+ID` for each group that starts and `-ID` for each that has ended. It imports nothing but the
standard library, so that it starts at once.
"""

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress


def kill_group(group: int) -> None:
    """Kill all processes of a group, if any is left."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


class GroupWatch:
    """The process groups that are to end with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pipe: int | None = None
        """To the program, which is started for the first group."""

    @contextmanager
    def watch(self, group: int) -> Generator[None]:
        """Kill a group if this process dies in the block, and at the end of it."""
        try:
            self._send(f"+{group}\n")
            yield
        finally:
            kill_group(group)
            self._send(f"-{group}\n")

    def _send(self, line: str) -> None:
        with self._lock:
            if self._pipe is None:
                self._pipe = _start_program()
            with suppress(BrokenPipeError):
                os.write(self._pipe, line.encode())


def _start_program() -> int:
    """Start the program, and return the pipe to its stdin, which only this process holds."""
    read_end, write_end = os.pipe()
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", __file__],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, read_end, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setpgroup=0,  # Ctrl-C is the runner's
    )
    os.close(read_end)
    return write_end


def main() -> None:
    """Read groups until the runner is gone, and kill those that are left."""
    groups = set[int]()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        kill_group(group)


if __name__ == "__main__":
    main()
