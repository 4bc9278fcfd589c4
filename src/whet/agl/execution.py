"""Execution strategies: the algorithm and the runners, in one process or by role in several."""

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, Protocol

from whet.agl.store.base import LightningStore
from whet.agl.store.client import LightningStoreClient
from whet.errors import ConfigError

logger = logging.getLogger(__name__)

ROLES = ("algorithm", "runner", "both")
DEFAULT_PORT = 4747


class AlgorithmBundle(Protocol):
    """Runs the algorithm on a store."""

    def __call__(self, store: LightningStore, event: threading.Event) -> Awaitable[None]: ...


class RunnerBundle(Protocol):
    """Runs one runner on a store until the event is set."""

    def __call__(
        self, store: LightningStore, worker_id: int, event: threading.Event
    ) -> Awaitable[None]: ...


class ExecutionStrategy:
    """The base class of strategies."""

    n_runners: int = 1

    def execute(
        self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore
    ) -> None:
        """Run both until the algorithm has ended."""
        raise NotImplementedError


class SharedMemoryExecutionStrategy(ExecutionStrategy):
    """Runs everything in this process; the runners are tasks of one event loop."""

    def __init__(self, n_runners: int = 1, graceful_delay: float = 5.0, **options: Any) -> None:
        """Agent Lightning's `options` for threads are accepted and ignored."""
        self.n_runners = n_runners
        self._stop_timeout_s = graceful_delay

    def execute(
        self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore
    ) -> None:
        asyncio.run(self._run(algorithm, runner, store))

    async def _run(
        self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore
    ) -> None:
        event = threading.Event()
        runners = [
            asyncio.ensure_future(runner(store, number, event)) for number in range(self.n_runners)
        ]
        algorithm_task = asyncio.ensure_future(algorithm(store, event))
        try:
            left = {algorithm_task, *runners}
            while not algorithm_task.done():
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # a runner that failed must not leave the algorithm waiting
        finally:
            event.set()
            algorithm_task.cancel()
            _, late = await asyncio.wait(runners, timeout=self._stop_timeout_s)
            for task in (*late, algorithm_task):
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task


class ClientServerExecutionStrategy(ExecutionStrategy):
    """Runs by role: `algorithm` serves the store, `runner` connects to it, `both` is one process.

    The role is the argument or AGL_CURRENT_ROLE; host and port are AGL_SERVER_HOST and
    AGL_SERVER_PORT.
    """

    def __init__(
        self,
        role: str | None = None,
        server_host: str | None = None,
        server_port: int | None = None,
        n_runners: int = 1,
        graceful_timeout: float = 10.0,
        managed_store: bool | None = None,
        **options: Any,
    ) -> None:
        """Agent Lightning's `options` for processes are accepted and ignored.

        Raises:
            ConfigError: the role is unknown.
        """
        self.role = role or os.environ.get("AGL_CURRENT_ROLE", "both")
        if self.role not in ROLES:
            raise ConfigError(f"unknown role {self.role!r}: expected {', '.join(ROLES)}")
        self.server_host = server_host or os.environ.get("AGL_SERVER_HOST", "127.0.0.1")
        port = os.environ.get("AGL_SERVER_PORT", str(DEFAULT_PORT))
        self.server_port = int(port) if server_port is None else server_port
        self.n_runners = n_runners
        managed = os.environ.get("AGL_MANAGED_STORE", "1").lower() not in ("0", "false")
        self.managed_store = managed if managed_store is None else managed_store
        self._stop_timeout_s = graceful_timeout

    def execute(
        self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore
    ) -> None:
        if self.role == "both":
            in_process = SharedMemoryExecutionStrategy(self.n_runners, self._stop_timeout_s)
            in_process.execute(algorithm, runner, store)
        elif self.role == "algorithm":
            asyncio.run(self._run_algorithm(algorithm, store))
        else:
            asyncio.run(self._run_runners(runner, store))

    async def _run_algorithm(self, algorithm: AlgorithmBundle, store: LightningStore) -> None:
        if not self.managed_store:
            await algorithm(store, threading.Event())
            return
        from whet.agl.store.server import LightningStoreServer  # noqa: PLC0415 - needs the extra

        server = LightningStoreServer(store, self.server_host, self.server_port)
        await server.start()
        try:
            await algorithm(server, threading.Event())
        finally:
            await server.stop()

    async def _run_runners(self, runner: RunnerBundle, store: LightningStore) -> None:
        if self.managed_store:
            host = "127.0.0.1" if self.server_host == "localhost" else self.server_host
            store = LightningStoreClient(f"http://{host}:{self.server_port}")
        event = threading.Event()
        await asyncio.gather(*(runner(store, number, event) for number in range(self.n_runners)))
        if isinstance(store, LightningStoreClient):
            await store.close()
