"""Control groups of the kernel that bound the processes and the memory of an attempt."""

import os
import secrets
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from whet.runners.sandboxes.sandbox import SandboxLimits

ROOT = Path("/sys/fs/cgroup")
END_TIMEOUT_S = 10.0
OWN_PROCESSES = 8
"""Allowance for the programs around the command."""


class ControlGroups:
    """The groups of one attempt: those that the system lets us make, if any."""

    def __init__(self, processes: Path | None, memory: Path | None) -> None:
        """The groups that bound the processes and the memory; in version 2 they are the same."""
        self.bounds_processes = processes is not None
        self.bounds_memory = memory is not None
        self._folders = {folder for folder in (processes, memory) if folder is not None}

    @property
    def files(self) -> list[str]:
        """Files that a process writes its id to, to join."""
        return [str(folder / "cgroup.procs") for folder in self._folders]

    def kill(self) -> None:
        """Kill every process in the groups, whatever session it has moved to, and remove them."""
        deadline = time.monotonic() + END_TIMEOUT_S
        for folder in self._folders:
            while time.monotonic() < deadline:
                with suppress(OSError):
                    for line in (folder / "cgroup.procs").read_text().split():
                        with suppress(ProcessLookupError):
                            os.kill(int(line), signal.SIGKILL)
                    folder.rmdir()
                    break
                time.sleep(0.01)


@contextmanager
def open_groups(limits: SandboxLimits) -> Generator[ControlGroups]:
    """Make groups with the limits where the system allows it; all in them is killed at the end."""
    name = f"whet-{os.getpid()}-{secrets.token_hex(4)}"
    processes, memory = limits.processes + OWN_PROCESSES, limits.memory_mb * 2**20
    if (ROOT / "cgroup.controllers").exists():  # version 2
        both = _make(ROOT / name, {"pids.max": processes, "memory.max": memory})
        groups = ControlGroups(both, both)
    else:
        groups = ControlGroups(
            _make(ROOT / "pids" / name, {"pids.max": processes}),
            _make(ROOT / "memory" / name, {"memory.limit_in_bytes": memory}),
        )
    try:
        yield groups
    finally:
        groups.kill()


def can_bound_processes() -> bool:
    """Whether this process may bound the processes of a command by a group."""
    with open_groups(SandboxLimits()) as groups:
        return groups.bounds_processes


def _make(folder: Path, limits: dict[str, int]) -> Path | None:
    """Make a group; returns None where that is not allowed."""
    try:
        folder.mkdir()
    except OSError:
        return None
    try:
        for name, value in limits.items():
            (folder / name).write_text(str(value))
    except OSError:
        with suppress(OSError):
            folder.rmdir()
        return None
    return folder
