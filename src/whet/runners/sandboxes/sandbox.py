"""The protocol of sandboxes, their limits, and the relay to the gateway."""

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from whet.errors import AgentFailed, ConfigError
from whet.types import Endpoint

RELAY_BYTES = 2**16
SOCKET = "gateway.sock"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of one attempt; its time limit is the rollout's."""

    memory_mb: int = 4096
    processes: int = 256
    disk_mb: int = 1024

    def __post_init__(self) -> None:
        if (found := min(self.memory_mb, self.processes, self.disk_mb)) < 1:
            raise ConfigError(f"expected sandbox limits of at least 1, found {found}")


@dataclass(frozen=True, slots=True)
class SandboxedCommand:
    """A command line to start, and where."""

    arguments: Sequence[str]
    folder: Path
    environment: Mapping[str, str]


class Sandbox(Protocol):
    """Isolates a command from this machine and from other attempts."""

    def check(self) -> None:
        """Raise ConfigError if this system cannot run it."""
        ...

    def open(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], llm: Endpoint
    ) -> AbstractAsyncContextManager[SandboxedCommand]:
        """Prepare a command whose working directory is `folder`, empty except for its task.

        When the block ends, every process of the command is gone. Raises AgentFailed at its end if
        a limit was exceeded.
        """
        ...


def absolute_arguments(arguments: Sequence[str]) -> list[str]:
    """Arguments with existing relative files made absolute: the command runs in another folder."""
    return [
        str(Path(each).absolute()) if not each.startswith("-") and Path(each).exists() else each
        for each in arguments
    ]


def read_gateway_address(llm: Endpoint) -> tuple[str, int]:
    """Host and port of the endpoint of an attempt. Raises AgentFailed for one over TLS."""
    parts = urlsplit(llm.base_url)
    if parts.scheme == "https":
        raise AgentFailed(f"a sandbox passes on plain HTTP, found the gateway {llm.base_url!r}")
    return parts.hostname or LOOPBACK, parts.port or 80


def relocate_gateway(environment: Mapping[str, str], llm: Endpoint) -> dict[str, str]:
    """The variables of a command in a network of its own, where the relay is the gateway."""
    outside = f"http://{urlsplit(llm.base_url).netloc}"
    inside = f"http://{LOOPBACK}:{read_gateway_address(llm)[1]}"
    return {
        name: inside + value.removeprefix(outside)
        if value == outside or value.startswith(f"{outside}/")
        else value
        for name, value in environment.items()
    }


@asynccontextmanager
async def relay_gateway(socket: Path, llm: Endpoint) -> AsyncGenerator[None]:
    """Pass connections at a Unix socket on to the gateway: the only way out of a sandbox."""
    host, port = read_gateway_address(llm)
    open_tasks = set[asyncio.Task[None]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_tasks.add(task)
        try:
            there, back = await asyncio.open_connection(host, port)
            try:
                await asyncio.gather(_copy(reader, back), _copy(there, writer))
            finally:
                back.close()
        except OSError:
            pass  # the client sees a closed connection
        finally:
            writer.close()
            open_tasks.discard(task)

    server = await asyncio.start_unix_server(serve, path=str(socket))
    os.chmod(socket, 0o666)  # an unmapped user of a container connects as well
    try:
        yield
    finally:
        server.close()
        for task in list(open_tasks):
            task.cancel()
        await asyncio.gather(*open_tasks, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(RELAY_BYTES):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
