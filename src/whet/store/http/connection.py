"""A small HTTP/1.1 client: connections that are kept, one request at a time on each.

It knows what our server sends and no more: no redirects, no cookies, no pipelining.
"""

import asyncio
import ssl
from collections.abc import AsyncIterable, Callable, Mapping
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

from whet.errors import ConfigError, StoreError
from whet.store.http import gzipped

IDLE_S = 60.0
"""Shorter than servers keep an idle connection: whoever closes it must not be the other side."""
CONNECT_S = 10.0
MAX_ANSWER = 2**32

Sink = Callable[[bytes], object]


class Disconnected(Exception):
    """The connection was lost before the answer was whole."""


class Reply(NamedTuple):
    """An answer; its body is empty if it went to a sink."""

    status: int
    body: bytes


class Request(NamedTuple):
    """What to send, and where the body of a success goes if it is not to be kept in memory.

    It may be sent more than once.
    """

    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = {}
    pieces: Callable[[], AsyncIterable[bytes]] | None = None
    """Makes a body that is sent piece by piece instead."""
    sink: Callable[[], Sink] | None = None


class Address(NamedTuple):
    """Where the server is."""

    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def of(cls, url: str) -> "Address":
        """Raises ConfigError."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is no address of a store: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ConfigError(f"{url!r} is no address of a store: expected http://host:port")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/"))


class Connections:
    """Connections to one server, in one event loop."""

    def __init__(self, address: Address, headers: Mapping[str, str]) -> None:
        self._address = address
        self._tls = ssl.create_default_context() if address.tls else None
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._idle: list[_Connection] = []

    async def ask(self, request: Request) -> Reply:
        """One request and its answer. Raises Disconnected or OSError."""
        connection = self._take() or await self._connect()
        try:
            reply = await connection.ask(self._head(request), request)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        return reply

    def close(self) -> None:
        """Let go of those that are idle; the others are let go of by who uses them."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _take(self) -> "_Connection | None":
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now - connection.idle_since < IDLE_S:
                return connection
            connection.close()
        return None

    async def _connect(self) -> "_Connection":
        loop, address = asyncio.get_running_loop(), self._address
        async with asyncio.timeout(CONNECT_S):
            _, connection = await loop.create_connection(
                _Connection, address.host, address.port, ssl=self._tls
            )
        return connection

    def _head(self, request: Request) -> bytes:
        host = f"[{self._address.host}]" if ":" in self._address.host else self._address.host
        own = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        length = (
            f"Content-Length: {len(request.body)}\r\n"
            if request.pieces is None
            else "Transfer-Encoding: chunked\r\n"
        )
        return (
            f"{request.method} {self._address.prefix}{request.path} HTTP/1.1\r\n"
            f"Host: {host}:{self._address.port}\r\n{self._headers}{own}{length}\r\n"
        ).encode("latin-1")


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Reply] | None = None
        self._sink: Sink | None = None
        self._body = bytearray()
        self._encoding = b""
        self._keep = True
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, head: bytes, request: Request) -> Reply:
        if not self.is_open or self._transport is None:
            raise Disconnected("the connection is closed")
        answer = self._answer = asyncio.get_running_loop().create_future()
        self._sink = request.sink and request.sink()
        if request.pieces is None:
            self._transport.writelines((head, request.body))
        else:
            self._transport.write(head)
            await self._send(self._transport, request.pieces(), answer)
        return await answer

    async def _send(
        self,
        transport: asyncio.Transport,
        pieces: AsyncIterable[bytes],
        answer: asyncio.Future[Reply],
    ) -> None:
        async for piece in pieces:
            await self._writable.wait()
            if answer.done():
                self.close()  # it was refused before it was whole, or the connection is lost
                return
            transport.writelines((f"{len(piece):x}\r\n".encode(), piece, b"\r\n"))
        transport.write(b"0\r\n\r\n")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------ asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()
        self._fail(Disconnected(str(exc or "the server closed the connection")))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, StoreError, OSError) as error:
            self._fail(Disconnected(f"the answer cannot be read: {error}"))
            self.close()

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    # ------------------------------------------------------------------ the parser calls these

    def on_message_begin(self) -> None:
        self._body = bytearray()
        self._encoding = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-encoding":
            self._encoding = value.strip().lower()

    def on_body(self, body: bytes) -> None:
        if self._sink is not None and self._parser.get_status_code() == 200:
            self._sink(body)
        else:
            self._body += body

    def on_message_complete(self) -> None:
        body = bytes(self._body)
        if self._encoding == b"gzip":
            body = gzipped.unpack(body, MAX_ANSWER)
        if not self._parser.should_keep_alive():
            self.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(Reply(self._parser.get_status_code(), body))
        self._body = bytearray()
