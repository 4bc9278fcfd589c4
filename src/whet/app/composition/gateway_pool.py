"""Gateways in processes of their own, which sample from the engine of this process.

They share neither an interpreter lock with engine and trainer nor with each other. Each opens the
run's SQLite file itself, and an attempt keeps to one of them. A gateway that dies is started again
at the same port; `gateway_worker.py` is its side.
"""

import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
from anyio import CancelScope, create_task_group, fail_after, move_on_after
from anyio.abc import Process, TaskStatus
from anyio.streams.buffered import BufferedByteReceiveStream

from whet.app.composition.distributed import find_endpoints
from whet.app.composition.gateway_server import ADDRESS_FILE, PORT_FLAG, Gateway, write_address_file
from whet.app.composition.samplers import Sampler
from whet.app.run_folder import RunFolder
from whet.config import RunConfig
from whet.engines.socket_engine import EngineServer
from whet.errors import ConfigError, EngineError
from whet.io.process import SUPERVISED, RestartBackoff
from whet.io.server import get_url, listen
from whet.io.threads import unwrap_group
from whet.protocols import Store
from whet.runners.agent import POLICY
from whet.runners.endpoints import Endpoints
from whet.types import Attempt, Endpoint, GatewayAddress, Value

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
MAX_LINE_BYTES = 2**20

Progress = Callable[[str], None]


class GatewaySettings(Value):
    """Settings of a gateway process: one line of JSON on its stdin."""

    config: RunConfig
    model: Path
    """Folder of the tokenizer and the chat template."""
    context_length: int
    secret: str
    """Of the run's API keys, in hex."""
    store: Path
    run: str
    judge: Endpoint | None
    prepares: bool
    """Whether the engine has to be prepared for an attempt."""
    log_level: int
    listener: int = -1
    """File descriptor of the socket it listens at."""
    engine: int = -1
    """File descriptor of its connection to the engine."""


@asynccontextmanager
async def open_gateway_pool(
    count: int, settings: GatewaySettings, server: EngineServer, store: Store, progress: Progress
) -> AsyncGenerator[tuple[Gateway, Endpoints]]:
    """Run gateways in processes; yields the first one, and the endpoints of attempts at them all.

    Raises:
        ConfigError: a gateway cannot be started.
        EngineError: a gateway died too often; raised inside the block.
    """
    gateway = settings.config.gateway
    secret = bytes.fromhex(settings.secret)
    async with AsyncExitStack() as stack:
        processes: list[GatewayProcess] = []
        for n in range(count):
            listener = listen(gateway.host, 0 if n else gateway.port, PORT_FLAG)
            stack.enter_context(listener)
            note = progress if n == 0 else logger.debug
            processes.append(GatewayProcess(listener, settings, server, note))
        urls = [get_url(process.listener) for process in processes]
        addresses = [GatewayAddress(url, POLICY) for url in urls]
        endpoints = find_endpoints(store, secret, addresses)
        stack.enter_context(write_address_file(urls[0]))
        with unwrap_group():
            async with create_task_group() as tasks:
                async with create_task_group() as starts:
                    for process in processes:
                        starts.start_soon(tasks.start, process.keep_alive)
                yield Gateway(urls[0], secret, POLICY), endpoints
                tasks.cancel_scope.cancel()


@asynccontextmanager
async def serve_in_processes(
    count: int,
    sampler: Sampler,
    model: Path,
    folder: RunFolder,
    store: Store,
    secret: bytes,
    prepare: Callable[[Attempt], Awaitable[None]] | None,
    judge: Endpoint | None,
    progress: Progress,
) -> AsyncGenerator[tuple[Gateway, Endpoints]]:
    """Serve the sampler of a run by gateways in processes, as `open_gateway_pool` yields them."""
    server = EngineServer(sampler.engine, prepare)
    settings = GatewaySettings(
        config=folder.read_config(),
        model=model,
        context_length=sampler.context_length,
        secret=secret.hex(),
        store=folder.store,
        run=store.run,
        judge=judge,
        prepares=prepare is not None,
        log_level=logging.getLogger("whet").getEffectiveLevel(),
    )
    try:
        async with open_gateway_pool(count, settings, server, store, progress) as served:
            yield served
    finally:
        await server.close()


class GatewayProcess:
    """A gateway process, started again when it dies."""

    def __init__(
        self,
        listener: socket.socket,
        settings: GatewaySettings,
        server: EngineServer,
        progress: Progress,
    ) -> None:
        """The listener stays open between two processes: connections wait for the next one."""
        self.listener = listener
        self._settings = settings
        self._server = server
        self._progress = progress

    async def keep_alive(self, *, task_status: TaskStatus[None]) -> None:
        """Run the process until canceled, which ends it in order.

        Raises:
            ConfigError: it cannot be started.
            EngineError: it died too often.
        """
        backoff = RestartBackoff(first_pause_s=0.1)
        while True:
            began = time.monotonic()
            code = await self._run(task_status.started)
            task_status = anyio.TASK_STATUS_IGNORED
            exit = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            pause = backoff.count_death(time.monotonic() - began)
            if pause is None:
                raise EngineError(
                    f"a gateway process died {backoff.deaths} times in a row ({exit}): resume "
                    "the run; with gateway.processes 0 the gateway runs in this process"
                )
            logger.warning("a gateway process died (%s): it is started again", exit)
            await anyio.sleep(pause)

    async def _run(self, on_ready: Callable[[], None]) -> int:
        """Start the process and wait for its end; returns the exit code."""
        mine, other = socket.socketpair()
        with other:
            await self._server.add(mine)
            process = await self._start(other)
        assert process.stdout is not None
        messages = BufferedByteReceiveStream(process.stdout)
        try:
            with fail_after(START_TIMEOUT_S) as starting:
                while (message := await _receive(messages)) is not None:
                    if "ready" in message:
                        starting.deadline = float("inf")
                        on_ready()
                    self._handle(message)
            return await process.wait()
        except TimeoutError:
            raise EngineError(
                f"a gateway process did not start within {START_TIMEOUT_S:g} s"
            ) from None
        finally:
            with CancelScope(shield=True):
                await _stop(process)

    async def _start(self, engine: socket.socket) -> Process:
        fds = {"listener": self.listener.fileno(), "engine": engine.fileno()}
        variables = {k: v for k, v in os.environ.items() if k != ADDRESS_FILE}
        process = await anyio.open_process(
            [sys.executable, "-m", "whet.app.composition.gateway_worker"],
            stderr=None,
            env={**variables, SUPERVISED: "1"},
            start_new_session=True,  # Ctrl-C in the terminal reaches this process alone
            pass_fds=tuple(fds.values()),
        )
        assert process.stdin is not None
        line = self._settings.model_copy(update=fds).model_dump_json().encode() + b"\n"
        with suppress(anyio.BrokenResourceError):  # it died: its output says so
            await process.stdin.send(line)
        return process

    def _handle(self, message: dict[str, Any]) -> None:
        match message:
            case {"error": str(text)}:
                raise ConfigError(text)
            case {"note": str(text)}:
                self._progress(text)
            case {"log": [str(name), int(level), str(text)]}:
                logging.getLogger(name).log(level, "%s", text)
            case _:
                pass


async def _receive(messages: BufferedByteReceiveStream) -> dict[str, Any] | None:
    """The next message of a process; None at its end."""
    try:
        return json.loads(await messages.receive_until(b"\n", MAX_LINE_BYTES))
    except (anyio.IncompleteRead, anyio.EndOfStream, anyio.ClosedResourceError):
        return None


async def _stop(process: Process) -> None:
    """Close the process's stdin, which ends it in order; kill it if it does not."""
    assert process.stdin is not None
    await process.stdin.aclose()
    with move_on_after(STOP_TIMEOUT_S):
        await process.wait()
    if process.returncode is None:
        process.kill()
    await process.aclose()
