"""HTTP load from one process; replies are not parsed, so that it is no bottleneck."""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast


class Connection(asyncio.Protocol):
    """One request at a time on a kept-alive connection; only the end of a reply is detected."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._received = bytearray()
        self.first_byte = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._received:
            self.first_byte = time.perf_counter()
        self._received += data
        if self._is_whole() and self._done and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done and not self._done.done():
            self._done.set_exception(ConnectionError("the server closed the connection"))

    async def send(self, request: bytes) -> bytes:
        """Return the body of the reply. Raises ConnectionError, also for any status but 200."""
        assert self._transport is not None
        self._received.clear()
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done
        head, _, body = bytes(self._received).partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise ConnectionError(bytes(self._received[:500]).decode(errors="replace"))
        return body

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()

    def _is_whole(self) -> bool:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = self._received[:end].lower()
        at = head.find(b"content-length:")
        if at < 0:
            return self._received.endswith(b"\r\n0\r\n\r\n")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0])
        return len(self._received) >= end + 4 + length


async def ask(address: str, request: bytes) -> bytes:
    """Send one request on a new connection and return the body of the reply."""
    host, port = address.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    _, line = await loop.create_connection(Connection, host, int(port))
    body = await line.send(request)
    line.close()
    return body


@dataclass
class Measured:
    """One server under one kind of load."""

    latencies: list[float] = field(default_factory=list[float])
    first_bytes: list[float] = field(default_factory=list[float])
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def per_second(self) -> float:
        return len(self.latencies) / self.wall_s

    @property
    def cpu_ms(self) -> float:
        """CPU time of the server for each request."""
        return 1000 * self.cpu_s / len(self.latencies)

    def latency_ms(self, share: float) -> float:
        return 1000 * sorted(self.latencies)[int(share * (len(self.latencies) - 1))]

    def __add__(self, other: "Measured") -> "Measured":
        return Measured(
            self.latencies + other.latencies,
            self.first_bytes + other.first_bytes,
            self.wall_s + other.wall_s,
            self.cpu_s + other.cpu_s,
        )


Conversation = Sequence[bytes]
"""The requests of one agent, in order."""


def conversation(path: str, key: str, bodies: Sequence[bytes]) -> Conversation:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    kind = "content-type: application/json\r\n"
    return [f"{head}{kind}content-length: {len(body)}\r\n\r\n".encode() + body for body in bodies]


async def put_load(
    address: str,
    process: int,
    conversations: Sequence[Conversation],
    *,
    concurrency: int,
    seconds: float,
) -> Measured:
    """Run `concurrency` agents at once, each with its own connection.

    `process` is the server's, whose CPU time is measured.
    """
    host, port = address.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    lines = [
        (await loop.create_connection(Connection, host, int(port)))[1] for _ in range(concurrency)
    ]
    measured, left = Measured(), iter(conversations)
    before, began = cpu_s(process), time.perf_counter()

    async def agent(line: Connection) -> None:
        for requests in left:
            for request in requests:
                sent = time.perf_counter()
                await line.send(request)
                measured.latencies.append(time.perf_counter() - sent)
                measured.first_bytes.append(line.first_byte - sent)
            if time.perf_counter() - began > seconds:
                return

    await asyncio.gather(*map(agent, lines))
    measured.wall_s = time.perf_counter() - began
    measured.cpu_s = cpu_s(process) - before
    for line in lines:
        line.close()
    return measured


def cpu_s(process: int | None) -> float:
    """Return the CPU time of a process and its descendants so far; zero without a process."""
    family, ticks = {process}, 0
    for stat in sorted(Path("/proc").glob("[0-9]*/stat"), key=lambda path: int(path.parent.name)):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if (number := int(stat.parent.name)) in family or int(fields[1]) in family:
            family.add(number)
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
