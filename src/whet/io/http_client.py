"""The HTTP client of the package: pooled connections with our timeouts, on aiohttp.

    async with HttpClient(token=key) as http:
        reply = await http.request("POST", url, json={"prompt": "hi"}, timeout_s=30)
        async with http.stream("GET", other) as response:
            async for chunk in response.content.iter_any(): ...

It never retries and raises no error for a status: both are the caller's to decide. Whatever keeps
a response from arriving whole is a TransportError, which callers map to an error of their part.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import urlsplit

from whet.errors import MissingExtra

if TYPE_CHECKING:  # a third of a second to import, and not installed everywhere
    import aiohttp

CONNECT_S = 10.0
KEEPALIVE_S = 4.0
"""How long an idle connection is kept: shorter than the 5 s after which uvicorn closes one, since
a request on a connection that is being closed fails."""

RequestBody = bytes | AsyncIterable[bytes]


class TransportError(Exception):
    """No whole response: not connected, disconnected, timed out, unreadable, or too large."""


class ConnectError(TransportError):
    """No connection was established: nothing was sent."""


class Response(NamedTuple):
    """A whole response, whatever its status."""

    status: int
    headers: Mapping[str, str]
    """By name in any case."""
    body: bytes

    def json(self) -> Any:  # Any: as json.loads
        """Parse the body. Raises ValueError, also for JSON that is nested too deeply."""
        try:
            return json.loads(self.body)
        except RecursionError as error:
            raise ValueError("the JSON is nested too deeply") from error


class HttpClient:
    """A pool of connections, usable from several event loops: each gets a session of its own."""

    def __init__(
        self,
        *,
        token: str = "",
        headers: Mapping[str, str] | None = None,
        connect_s: float = CONNECT_S,
        keepalive_s: float = KEEPALIVE_S,
        trust_env: bool = False,
    ) -> None:
        """`token` is sent as a bearer token.

        `trust_env` honors HTTP_PROXY and the like, but not for a URL of this machine's loopback.
        """
        # Compression costs more than it saves on one machine; pass the header to ask for it.
        self._headers = {"Accept-Encoding": "identity", **(headers or {})}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._connect_s = connect_s
        self._keepalive_s = keepalive_s
        self._trust_env = trust_env
        self._sessions: dict[tuple[asyncio.AbstractEventLoop, bool], aiohttp.ClientSession] = {}
        """By event loop, and whether the session honors HTTP_PROXY."""
        self._closed = False
        self.connections = 0
        """Connections established so far, to all hosts."""

    async def request(
        self,
        method: str,
        url: str,
        *,
        json: object = None,
        body: RequestBody | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        max_bytes: int | None = None,
    ) -> Response:
        """Send a request and read the whole response. Raises TransportError.

        `timeout_s` limits request and response together; without it there is no limit.
        """
        try:
            async with (
                asyncio.timeout(timeout_s),
                self.stream(method, url, json=json, body=body, headers=headers) as response,
            ):
                return Response(response.status, response.headers, await _read(response, max_bytes))
        except TimeoutError as error:
            raise TransportError(f"no response within {timeout_s:g} s") from error

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        url: str,
        *,
        json: object = None,
        body: RequestBody | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> "AsyncGenerator[aiohttp.ClientResponse]":
        """Send a request; the response's body is read inside. Leaving early disconnects.

        Raises:
            TransportError: also for a connection error of aiohttp that was raised inside.
        """
        session = self._open_session(self._trust_env and not _is_loopback_url(url))
        import aiohttp  # noqa: PLC0415 - see above

        try:
            sent = session.request(method, url, json=json, data=body, headers=headers)
            async with sent as response:
                yield response
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                raise  # of a timeout around this
            is_unsent = isinstance(
                error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
            )
            kind = ConnectError if is_unsent else TransportError
            raise kind(str(error) or type(error).__name__) from error

    async def close(self) -> None:
        """Close every session in its own loop; requests under way fail. Idempotent."""
        self._closed = True
        sessions, self._sessions = self._sessions, {}
        for (loop, _), session in sessions.items():
            if loop is asyncio.get_running_loop():
                await session.close()
            elif loop.is_running():
                closing = asyncio.run_coroutine_threadsafe(session.close(), loop)
                await asyncio.wrap_future(closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _count_connection(self, *details: object) -> None:
        self.connections += 1

    def _open_session(self, trust_env: bool) -> "aiohttp.ClientSession":
        if self._closed:
            raise TransportError("the HTTP client is closed")
        key = asyncio.get_running_loop(), trust_env
        if key not in self._sessions:
            try:
                import aiohttp  # noqa: PLC0415 - see above
            except ImportError as error:
                raise MissingExtra.build("an HTTP client", "runner") from error
            trace = aiohttp.TraceConfig()
            trace.on_connection_create_end.append(self._count_connection)
            self._sessions[key] = aiohttp.ClientSession(
                trace_configs=[trace],
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keepalive_s),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=trust_env,
            )
        return self._sessions[key]


def is_loopback(host: str) -> bool:
    """Whether a host is reachable from this machine only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_loopback_url(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:  # an invalid URL, which aiohttp reports
        return False


async def _read(response: "aiohttp.ClientResponse", max_bytes: int | None) -> bytes:
    if max_bytes is None:
        return await response.read()
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            raise TransportError(f"the response is larger than {max_bytes} bytes")
    return bytes(body)
