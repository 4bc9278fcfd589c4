"""Sandboxes of this machine: plain processes with limits, and bubblewrap."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from anyio import to_thread

from whet.errors import AgentFailed, ConfigError
from whet.runners.sandboxes import limit_launcher, relay
from whet.runners.sandboxes.control_groups import ControlGroups, can_bound_processes, open_groups
from whet.runners.sandboxes.sandbox import (
    SOCKET,
    Sandbox,
    SandboxedCommand,
    SandboxLimits,
    absolute_arguments,
    read_gateway_address,
    relay_gateway,
    relocate_gateway,
)
from whet.types import Endpoint

WATCH_S = 0.2
PID_FILE = ".pid"
"""The id of the command, which is also that of its process group."""
PYTHON = (sys.executable, "-I", "-S")


class SubprocessSandbox(Sandbox):
    """A process with limits in a folder of its own: it sees the machine and its network.

    For agents that are trusted and may go wrong, not for those that are not trusted.
    """

    def __init__(self, limits: SandboxLimits) -> None:
        self._limits = limits

    def check(self) -> None:
        _check_process_limit()

    @asynccontextmanager
    async def open(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], llm: Endpoint
    ) -> AsyncGenerator[SandboxedCommand]:
        with open_groups(self._limits) as groups:
            limits = build_limits(self._limits, groups)
            limits["RLIMIT_FSIZE"] = self._limits.disk_mb * 2**20
            command = [*build_launcher(groups, limits, folder), *absolute_arguments(arguments)]
            home = {"HOME": str(folder), "TMPDIR": str(folder)}
            is_full = asyncio.Event()
            watch = asyncio.create_task(
                _watch_folder(folder, self._limits.disk_mb, groups, is_full)
            )
            try:
                yield SandboxedCommand(command, folder, {**environment, **home})
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
            if is_full.is_set():
                raise AgentFailed(f"the command wrote more than {self._limits.disk_mb} MB")


class BubblewrapSandbox(Sandbox):
    """Namespaces by bubblewrap: the machine is read-only, and the network is the gateway alone.

    The working directory and `/tmp` are in memory, with the limit of the disk.
    """

    def __init__(self, limits: SandboxLimits) -> None:
        self._limits = limits

    def check(self) -> None:
        program = shutil.which("bwrap")
        if program is None:
            raise ConfigError("the sandbox bubblewrap needs the program bwrap: install bubblewrap")
        probe = [program, "--ro-bind", "/", "/", "--unshare-all", "true"]
        ended = subprocess.run(probe, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise ConfigError(f"bwrap does not work on this system: {ended.stderr.strip()}")
        _check_process_limit()

    @asynccontextmanager
    async def open(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], llm: Endpoint
    ) -> AsyncGenerator[SandboxedCommand]:
        socket = folder / SOCKET
        _, port = read_gateway_address(llm)
        with open_groups(self._limits) as groups:
            async with relay_gateway(socket, llm):
                command = [
                    *build_launcher(groups, build_limits(self._limits, groups), folder),
                    *self._build_namespaces(folder, socket),
                    *(*PYTHON, str(relay.__file__), "/tmp/.gateway", str(port)),
                    *absolute_arguments(arguments),
                ]
                inside = {"HOME": "/tmp/work", "TMPDIR": "/tmp"}
                if "WHET_TASK_FILE" in environment:
                    inside["WHET_TASK_FILE"] = "/tmp/work/task.json"
                variables = relocate_gateway(environment, llm) | inside
                yield SandboxedCommand(command, folder, variables)

    def _build_namespaces(self, folder: Path, socket: Path) -> list[str]:
        size = str(self._limits.disk_mb * 2**20)
        hidden = [path for path in (Path.cwd() / ".whet",) if path.is_dir()]
        project = Path.cwd()
        # /tmp is replaced: a project below it stays visible.
        visible = ["--ro-bind", str(project), str(project)] if _is_below(project, "/tmp") else []
        return [
            *("bwrap", "--unshare-all", "--die-with-parent", "--new-session"),
            *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
            *("--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", "/var/tmp"),
            *("--size", size, "--tmpfs", "/dev/shm"),
            *visible,
            *(part for path in hidden for part in ("--tmpfs", str(path))),
            *("--dir", "/tmp/work", "--ro-bind", str(socket), "/tmp/.gateway"),
            *("--ro-bind", str(folder / "task.json"), "/tmp/work/task.json"),
            *("--chdir", "/tmp/work", "--"),
        ]


def build_launcher(groups: ControlGroups, limits: Mapping[str, int], folder: Path) -> list[str]:
    """Build the start of a command line that joins groups and sets limits.

    The id of its process is written to `folder`.
    """
    pid = str(folder / PID_FILE)
    settings = json.dumps({"groups": groups.files, "limits": dict(limits), "pid": pid})
    return [*PYTHON, str(limit_launcher.__file__), settings]


def build_limits(limits: SandboxLimits, groups: ControlGroups) -> dict[str, int]:
    """Limits of each process, in place of those that no group has for all of them."""
    own = {"RLIMIT_CORE": 0}
    if not groups.bounds_processes:
        own["RLIMIT_NPROC"] = limits.processes
    if not groups.bounds_memory:
        own["RLIMIT_AS"] = limits.memory_mb * 2**20
    return own


def _check_process_limit() -> None:
    """Raise ConfigError where nothing would stop a command that forks without end."""
    if os.geteuid() == 0 and not can_bound_processes():
        raise ConfigError(
            "root's processes are limited by control groups only, and none can be made here: run "
            "as another user"
        )


async def _watch_folder(
    folder: Path, limit_mb: int, groups: ControlGroups, is_full: asyncio.Event
) -> None:
    """Kill the command once its folder holds more than the limit."""
    while not is_full.is_set():
        await asyncio.sleep(WATCH_S)
        if await to_thread.run_sync(measure_folder, folder) > limit_mb * 2**20:
            is_full.set()
    with suppress(OSError, ValueError):
        os.killpg(int(await to_thread.run_sync((folder / PID_FILE).read_text)), signal.SIGKILL)
    await to_thread.run_sync(groups.kill)


def measure_folder(folder: Path) -> int:
    """Bytes on disk of all files below a folder."""
    total = 0
    for path, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total


def _is_below(path: Path, folder: str) -> bool:
    return path.is_relative_to(folder) and path != Path(folder)
