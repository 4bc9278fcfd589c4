"""Served stores for tests: in this process, or in one that can be killed."""

import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from anyio import to_thread

from whet.store.http.bodies import DEFAULT_LIMITS, Limits
from whet.store.http.server import StoreServer
from whet.store.sql_store import SQLStore

TOKEN = "a-token-of-the-tests"

SERVE = """
import sys
from pathlib import Path
from whet.store.http.server import StoreServer
from whet.store.sqlite import SQLiteStore

server = StoreServer(SQLiteStore(Path(sys.argv[1])), token=sys.argv[2], port=int(sys.argv[3]))
print(server.url, flush=True)
sys.stdin.read()
server.close()
"""


@asynccontextmanager
async def serve(store: SQLStore, limits: Limits = DEFAULT_LIMITS) -> AsyncGenerator[StoreServer]:
    server = StoreServer(store, token=TOKEN, limits=limits)
    try:
        yield server
    finally:
        await to_thread.run_sync(server.close)


class ServerProcess:
    """A server on one port and one file, started as often as it is killed."""

    def __init__(self, file: Path) -> None:
        self._file = file
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        command = [sys.executable, "-c", SERVE, str(self._file), TOKEN, str(self._port)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == self.url

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(30)
        self._close_pipes()

    def stop(self) -> None:
        """Let it end by itself."""
        if self._process is not None and self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(30)
            self._close_pipes()

    def _close_pipes(self) -> None:
        assert self._process is not None
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def server_process(file: Path) -> Generator[ServerProcess]:
    server = ServerProcess(file)
    server.start()
    try:
        yield server
    finally:
        server.stop()
