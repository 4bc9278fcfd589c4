"""Runners on a Ray cluster: actors, each of which keeps one `whet runner` process alive.

A process, not the runner itself: what an agent imports, blocks or kills stays out of Ray's worker,
and a runner leaves as it does anywhere else, on SIGTERM.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from anyio import CancelScope, create_task_group, move_on_after, to_thread
from anyio.abc import TaskGroup

from whet.errors import ConfigError, boundary, requires_extra
from whet.io.process import SUPERVISED, RestartBackoff
from whet.io.threads import unwrap_group

logger = logging.getLogger(__name__)

LOCAL = "local"
"""Address of a cluster that is started for this process alone."""
EXIT_CONFIG_ERROR = 2
STOP_MARGIN_S = 15.0
"""Seconds beyond its grace after which a runner that does not leave is killed."""
CONNECT_TIMEOUT_S = 10.0
PENDING_NOTICE_S = 20.0
"""Seconds without a place in the cluster before a runner is reported as waiting."""


class RunnerActor:
    """Keeps a `whet runner` process alive on one node until it is stopped.

    Ray restarts the actor, on another node if its own is gone, and calls `run` again.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], folder: str):
        self._command = [sys.executable, "-m", "whet", "runner", *arguments]
        self._environment = {**os.environ, **environment, SUPERVISED: "1", "PYTHONUNBUFFERED": "1"}
        # Where the agent's file is: the same path as at the start, or what Ray has unpacked here.
        self._folder = folder if Path(folder).is_dir() else None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = threading.Event()
        self._starting = threading.Lock()

    def run(self) -> int:
        """Run the process, restart it when it dies; returns its exit code once that is over."""
        backoff = RestartBackoff()
        while True:
            began = time.monotonic()
            code = self._run_once()
            if self._is_stopping.is_set():
                return 0
            pause = backoff.count_death(time.monotonic() - began)
            if pause is None or code == EXIT_CONFIG_ERROR:
                return code
            sys.stdout.write(f"runner died, exit code {code}; restarting in {pause:g} s\n")
            sys.stdout.flush()
            self._is_stopping.wait(pause)

    def stop(self) -> None:
        """Let the process drain, and `run` return."""
        with self._starting:
            self._is_stopping.set()
            if self._process is not None:
                self._process.send_signal(signal.SIGTERM)

    def node(self) -> str:
        """Return the id of the node, once the actor has a place."""
        return _import_ray().get_runtime_context().get_node_id()

    def _run_once(self) -> int:
        with self._starting:
            if self._is_stopping.is_set():
                return 0
            # The pipe closes when this process dies, however: the runner then stops by itself.
            self._process = subprocess.Popen(
                self._command, env=self._environment, cwd=self._folder, stdin=subprocess.PIPE
            )
        with self._process as process:
            return process.wait()


@dataclass(slots=True)
class PooledRunner:
    """A runner of a pool, until `gone` is set."""

    actor: Any  # Any: Ray's handles have the methods of the actor
    gone: anyio.Event = field(default_factory=anyio.Event)
    is_leaving: bool = False


class RunnerPool:
    """Runners of one cluster, by number from 1; `scale` changes how many there are."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        tasks: TaskGroup,
        *,
        name: str,
        cpus: float,
        grace_s: float,
        progress: Callable[[str], None],
    ) -> None:
        self._arguments = arguments
        self._environment = environment
        self._tasks = tasks
        self._name = name
        self._grace_s = grace_s
        self._progress = progress
        self._runners: dict[int, PooledRunner] = {}
        ray = _import_ray()
        # A node with its runners may be gone at any time: start again, elsewhere, as often.
        self._actor_class = ray.remote(
            num_cpus=cpus,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=4,
            scheduling_strategy="SPREAD",
        )(RunnerActor)

    @property
    def size(self) -> int:
        """Number of runners that are not leaving."""
        return sum(not runner.is_leaving for runner in self._runners.values())

    async def scale(self, num: int) -> None:
        """Start runners, or let the last ones drain, until there are `num`.

        Returns once those that leave are gone; rollouts they could not finish are queued again.
        """
        for number in range(1, num + 1):
            if (runner := self._runners.get(number)) is not None and runner.is_leaving:
                await runner.gone.wait()  # until then its name is taken
            if number not in self._runners:
                self._start(number)
        async with create_task_group() as stops:
            for number, runner in self._runners.items():
                if number > num:
                    stops.start_soon(self._stop, number, runner)

    def _start(self, number: int) -> None:
        # Under its own name a restarted runner returns the rollouts of its predecessor at once.
        name = f"--worker={self._name}-{number}"
        actor = self._actor_class.remote(
            [name, *self._arguments], dict(self._environment), str(Path.cwd())
        )
        self._runners[number] = runner = PooledRunner(actor)
        self._tasks.start_soon(self._watch, number, runner)
        self._tasks.start_soon(self._report_pending, number, runner)

    async def _watch(self, number: int, runner: PooledRunner) -> None:
        code = 0
        try:
            code = await runner.actor.run.remote()
        except _import_ray().exceptions.RayActorError:  # killed: it did not leave in time
            if not runner.is_leaving:
                raise
        finally:
            del self._runners[number]
            runner.gone.set()
            _import_ray().kill(runner.actor)
        if code:
            raise ConfigError(
                f"the runner {self._name}-{number} cannot run: exit code {code}; its own lines "
                "above have the reason"
            )

    async def _report_pending(self, number: int, runner: PooledRunner) -> None:
        with move_on_after(PENDING_NOTICE_S):
            with suppress(_import_ray().exceptions.RayError):  # `_watch` sees it too
                await runner.actor.node.remote()
            return
        if not runner.is_leaving:
            free = _import_ray().available_resources().get("CPU", 0.0)
            self._progress(
                f"runner {self._name}-{number} waits for a place: the cluster has {free:g} CPUs "
                "free; add nodes, or scale down"
            )

    async def _stop(self, number: int, runner: PooledRunner) -> None:
        runner.is_leaving = True
        with move_on_after(self._grace_s + STOP_MARGIN_S):
            with suppress(_import_ray().exceptions.RayError):
                await runner.actor.stop.remote()
            await runner.gone.wait()
            return
        self._progress(f"runner {self._name}-{number} did not leave: killed")
        _import_ray().kill(runner.actor)


@asynccontextmanager
async def connect_ray(address: str) -> AsyncGenerator[None]:
    """Connect this process to a cluster while the block runs.

    Raises:
        ConfigError: there is no such cluster.
    """
    await to_thread.run_sync(_connect, address)
    _take_signals_back()
    try:
        yield
    finally:
        await to_thread.run_sync(_import_ray().shutdown)


@asynccontextmanager
async def open_pool(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    name: str,
    cpus: float,
    grace_s: float,
    progress: Callable[[str], None],
) -> AsyncGenerator[RunnerPool]:
    """Open an empty pool on the connected cluster; its runners leave at the end of the block.

    `arguments` are those of `whet runner`, `environment` adds to that of the nodes.

    Raises:
        ConfigError: a runner cannot run.
    """
    with unwrap_group():
        async with create_task_group() as tasks:
            pool = RunnerPool(
                arguments,
                environment,
                tasks,
                name=name,
                cpus=cpus,
                grace_s=grace_s,
                progress=progress,
            )
            try:
                yield pool
            finally:
                with CancelScope(shield=True):
                    await pool.scale(0)
            tasks.cancel_scope.cancel()


def list_node_addresses() -> set[str]:
    """Return the IP addresses of the cluster's live nodes."""
    nodes: list[dict[str, Any]] = _import_ray().nodes()
    return {node["NodeManagerAddress"] for node in nodes if node["Alive"]}


def find_own_address() -> str:
    """Return the IP address of this machine in the cluster."""
    return _import_ray().util.get_node_ip_address()


def _connect(address: str) -> None:
    ray = _import_ray()
    started: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {}
    what = (
        f"no Ray cluster at {address!r}: start one with `ray start --head`, name another, or "
        f"{LOCAL!r} for one in this process"
    )
    with boundary(ConfigError, what):
        _check_reachable(address)
        ray.init(address=address, logging_level="ERROR", **started)


def _check_reachable(address: str) -> None:
    """Raise OSError if nothing listens at `HOST:PORT`, which Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and "/" not in address and port.isdigit():
        with socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S):
            pass


def _take_signals_back() -> None:
    """Install our signal handlers again: Ray's print a stack, and abort three seconds later."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if (handler := signal.getsignal(number)) is not None:
                signal.signal(number, handler)
                signal.siginterrupt(number, False)


def _import_ray() -> Any:  # Any: hardly anything of Ray is typed
    with requires_extra("a Ray cluster", "ray"):
        import ray  # noqa: PLC0415 - only if needed
    return ray
