"""Runs an app in a thread of its own, so that whoever blocks its own loop cannot stop it."""

import asyncio
import logging
import socket
import threading
from typing import cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from whet.errors import ConfigError

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 120
"""Longer than clients keep an idle connection: the one who closes it must not be the server, while
a request may be on its way."""


class _Corked:
    """A transport that writes once for all that was said in one turn of the event loop.

    The head of a reply and its body then leave together: one system call, and one client that
    wakes up once.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held: list[bytes] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        held, self._held = self._held, []
        if held and not self._transport.is_closing():
            self._transport.write(b"".join(held))


class _Protocol(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(cast(asyncio.Transport, _Corked(transport)))


class AppServer:
    """A served app. `url` is where it is; it listens once this exists."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        name: str = "server",
        port_flag: str = "--port",
    ) -> None:
        """Port 0 takes any free one. Raises ConfigError, which names the flag, if it cannot."""
        listener = _listen(host, port, port_flag)
        address, port = listener.getsockname()[:2]
        self.url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                http=_Protocol,
                ws="none",
                # Nothing here asks who the client is, or tells what serves it.
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
        """Finish what is under way, then stop. Idempotent."""
        self._server.should_exit = True
        self._thread.join(timeout=10)


def _listen(host: str, port: int, port_flag: str) -> socket.socket:
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
