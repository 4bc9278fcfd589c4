"""A process of `gateway_pool.py`: a gateway over the engine of the process that started it.

Its settings are one line of JSON on stdin, whose end is the end of that process; what happens is
lines of JSON on stdout.
"""

import gc
import logging
import os
import socket
import sys

import anyio

from whet.app.composition.distributed import raise_file_limit
from whet.app.composition.gateway_pool import GatewaySettings
from whet.app.composition.gateway_server import serve_gateway
from whet.app.composition.samplers import TextEngine, build_renderer
from whet.engines.socket_engine import SocketEngine
from whet.errors import ConfigError
from whet.io.process import MessageWriter, follow_supervisor, handle_stop_signals
from whet.io.threads import run_async
from whet.store.sqlite import SQLiteStore

PARENT_POLL_S = 1.0
"""Seconds between checks for the parent: a process that it forked may keep our stdin open."""


def main() -> None:
    """Serve until the process that started this one is gone, or closes stdin."""
    messages = MessageWriter()
    settings = GatewaySettings.model_validate_json(_read_line())
    logging.basicConfig(level=logging.WARNING, handlers=[LogSender(messages)])
    logging.getLogger("whet").setLevel(settings.log_level)
    raise_file_limit()
    follow_supervisor()
    try:
        run_async(_serve, settings, messages)
    except ConfigError as error:
        messages.send({"error": str(error)})


async def _serve(settings: GatewaySettings, messages: MessageWriter) -> None:
    parent = os.getppid()
    engine = SocketEngine(socket.socket(fileno=settings.engine))
    renderer = build_renderer(settings.model, settings.config)
    algorithm = settings.config.algorithm
    async with handle_stop_signals() as stop:
        with stop.cancel_on_request():
            async with (
                SQLiteStore(settings.store, run=settings.run, expires_leases=False) as store,
                serve_gateway(
                    {"": TextEngine(engine, settings.context_length, renderer)},
                    settings.config,
                    store,
                    bytes.fromhex(settings.secret),
                    prepare=engine.prepare if settings.prepares else None,
                    algorithms=lambda: [algorithm],
                    judge=settings.judge,
                    listener=socket.socket(fileno=settings.listener),
                    progress=lambda text: messages.send({"note": text}),
                ),
            ):
                gc.freeze()  # modules and tokenizers live as long as the process
                messages.send({"ready": True})
                while os.getppid() == parent:  # noqa: ASYNC110 - no event tells of its death
                    await anyio.sleep(PARENT_POLL_S)


def _read_line() -> bytes:
    """Read stdin up to the end of its first line, which nothing follows."""
    line = b""
    while not line.endswith(b"\n"):
        if not (part := os.read(0, 2**16)):
            sys.exit(0)  # the parent ended before it had begun
        line += part
    return line


class LogSender(logging.Handler):
    """Sends log records to the process that started this one."""

    def __init__(self, messages: MessageWriter) -> None:
        super().__init__()
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.send({"log": [record.name, record.levelno, self.format(record)]})


if __name__ == "__main__":
    main()
