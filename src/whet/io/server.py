"""An ASGI server in its own thread, so that code which blocks its event loop cannot stop it."""

import asyncio
import logging
import socket
import threading
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from whet.errors import ConfigError

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 120
"""Longer than clients keep an idle connection: if the server closed it first, a request that is on
its way would be lost."""

MAX_UNSENT = 2**16
"""Bytes that wait for the end of a turn of the event loop: more are written at once."""


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
                http=_JoiningProtocol,
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


def get_url(listener: socket.socket) -> str:
    """The URL of what is served at a socket."""
    address, port = listener.getsockname()[:2]
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def listen(host: str, port: int, port_flag: str) -> socket.socket:
    """Listen on a port; 0 chooses a free one. Raises ConfigError, which names `port_flag`."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; "
            f"choose another with {port_flag}, or 0 for any free one"
        ) from error
    return listener


class _JoiningProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with the head of a response and its body in one write."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(_JoiningTransport(cast(asyncio.Transport, transport)))


class _JoiningTransport(asyncio.Transport):
    """A transport that joins the writes of one turn of the event loop.

    Each write to a socket is a system call that wakes the client, and costs more than the server's
    other work for a small response.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._unsent: list[bytes | bytearray | memoryview] = []
        self._size = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(data)
        self._size += len(data)
        if self._size > MAX_UNSENT:  # so that the sender is paused if nobody reads
            self._flush()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # Any: as asyncio has it
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def _flush(self) -> None:
        unsent, self._unsent, self._size = self._unsent, [], 0
        if unsent and not self._transport.is_closing():
            self._transport.writelines(unsent)
