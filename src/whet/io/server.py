"""An ASGI server in its own thread, so that code which blocks its event loop cannot stop it."""

import asyncio
import logging
import socket
import threading
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from whet.errors import ConfigError

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 120
"""Longer than clients keep an idle connection: if the server closed it first, a request that is on
its way would be lost."""

HEAD_TIMEOUT_S = 60.0
"""Time for the headers of a request to arrive, and for what is left of a body after the reply, so
that idle strangers hold no connections."""
MAX_HEAD_BYTES = 512 * 2**10
"""Largest request line with headers, or trailers of a body: each byte of these costs more than the
one before it."""
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n"

MAX_PORT = 65535


class AppServer:
    """A running server of an ASGI app at `url`; it listens once constructed."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        name: str = "server",
        port_flag: str = "--port",
        listener: socket.socket | None = None,
        head_timeout_s: float = HEAD_TIMEOUT_S,
    ) -> None:
        """Listen on a port, or with a `listener` that does; port 0 chooses a free one.

        Raises:
            ConfigError: it cannot; the message names `port_flag`.
        """
        listener = listener or listen(host, port, port_flag)
        self.url = get_url(listener)
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                http=partial(_Protocol, head_timeout_s=head_timeout_s),  # pyright: ignore[reportArgumentType]
                ws="none",
                # Nothing reads the client's address or the server's name.
                proxy_headers=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self._thread = threading.Thread(
            target=self._server.run,
            kwargs={"sockets": [listener]},
            name=f"whet-{name}",
            daemon=True,
        )
        self._thread.start()
        logger.info("%s listens url=%s", name, self.url)

    def close(self) -> None:
        """Finish the requests in progress, then stop. Idempotent."""
        self._server.should_exit = True
        self._thread.join(timeout=10)


class _Protocol(HttpToolsProtocol):
    """HTTP without requests whose headers are too large, or do not come, or that do not end."""

    def __init__(self, *arguments: Any, head_timeout_s: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_timeout_s = head_timeout_s
        self._head_bytes = 0
        """Received since the request began, or since the last part of its body."""
        self._timer: asyncio.TimerHandle | None = None
        """Set from the first byte of a request, and from the start, to the end of its headers; and
        from a reply that came before the request was complete to its end."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            if not self.cycle or self.cycle.response_complete:  # else a reply may be under way
                self.transport.write(TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.cycle.response_complete and self.cycle.more_body:  # not of a pipelined request
            self._start_timer()
        super().on_response_complete()

    def _expect_head(self) -> None:
        self._head_bytes = 0
        self._start_timer()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self._head_timeout_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def get_url(listener: socket.socket) -> str:
    """The URL of what is served at a socket."""
    address, port = listener.getsockname()[:2]
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def listen(host: str, port: int, port_flag: str) -> socket.socket:
    """Listen on a port; 0 chooses a free one. Raises ConfigError, which names `port_flag`."""
    key = port_flag.removeprefix("--")
    if not 0 <= port <= MAX_PORT:
        text = f"invalid {port_flag} {port}: expected 0 to {MAX_PORT}"
        raise ConfigError.phrase(python=text.replace(port_flag, key), command=text)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        text = (
            f"cannot listen on {host}:{port}: {error.strerror}; "
            f"choose another with {port_flag}, or 0 for any free one"
        )
        raise ConfigError.phrase(python=text.replace(port_flag, key), command=text) from error
    return listener
