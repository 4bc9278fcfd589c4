"""Runs the gateway in a thread of its own, so that an agent that blocks its loop cannot stop it."""

import logging
import socket
import threading

import uvicorn
from starlette.applications import Starlette

from whet.config import GatewayConfig
from whet.errors import ConfigError

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 120
"""Longer than clients keep an idle connection: the one who closes it must not be the server, while
a request may be on its way."""


class GatewayServer:
    """A served app. `url` is where it is; it listens once this exists."""

    def __init__(self, app: Starlette, config: GatewayConfig) -> None:
        listener = _listen(config)
        host, port = listener.getsockname()[:2]
        self.url = f"http://{host}:{port}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self._thread = threading.Thread(
            target=self._server.run,
            kwargs={"sockets": [listener]},
            name="whet-gateway",
            daemon=True,
        )
        self._thread.start()
        logger.info("gateway listens url=%s", self.url)

    def close(self) -> None:
        """Finish what is under way, then stop. Idempotent."""
        self._server.should_exit = True
        self._thread.join(timeout=10)


def _listen(config: GatewayConfig) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}; "
            "choose another with --gateway.port, or 0 for any free one"
        ) from error
    return listener
