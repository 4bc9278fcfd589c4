"""`LightningStoreServer`: serves a store over HTTP, on loopback and with a token by default."""

import asyncio
import hmac
import json
import logging

from starlette.types import ASGIApp, Receive, Scope, Send

from whet.agl.store.base import LightningStore, LightningStoreCapabilities
from whet.agl.store.rpc import HEALTH, METHODS, PREFIX, Method
from whet.errors import WhetError
from whet.io.server import AppServer
from whet.store.http.token import make_token

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**20
MAX_WAIT_S = 20.0
"""A wait in one request; clients ask again."""


class LightningStoreServer(LightningStore):
    """A store that clients reach at `endpoint` between `start` and `stop`; here it is the store."""

    def __init__(
        self,
        store: LightningStore,
        host: str = "127.0.0.1",
        port: int = 4747,
        *,
        token: str | None = None,
        cors_allow_origins: object = None,
        launch_mode: str = "thread",
        launcher_args: object = None,
        n_workers: int = 1,
        tracker: object = None,
    ) -> None:
        """Without a `token` it is that of `whet store`: WHET_STORE_TOKEN, or `.whet/store.token`.

        Raises:
            NotImplementedError: several workers, CORS or a tracker is requested.
        """
        if cors_allow_origins or launcher_args or tracker or n_workers != 1:
            raise NotImplementedError(
                "whet.agl's server is one process without CORS and trackers: leave out "
                "cors_allow_origins, launcher_args, tracker and n_workers, or use `whet store`"
            )
        if launch_mode not in ("thread", "mp", "asyncio"):
            raise ValueError(f"unknown launch_mode {launch_mode!r}: expected 'thread'")
        self._store = store
        self._address = "127.0.0.1" if host == "localhost" else host, port
        self._token = token
        self._server: AppServer | None = None

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        return self._store.capabilities

    @property
    def endpoint(self) -> str:
        """The URL for clients. Raises RuntimeError unless the server runs."""
        if self._server is None:
            raise RuntimeError("the store's server is not running: await server.start()")
        return self._server.url

    async def start(self) -> None:
        """Listen, in a thread. Raises ConfigError if the port is taken."""
        if self._server is None:
            token = self._token or make_token().value
            app = build_app(self._store, token)
            host, port = self._address
            self._server = await asyncio.to_thread(
                lambda: AppServer(app, host=host, port=port, name="agl-store")
            )

    async def stop(self) -> None:
        """Finish the requests in progress and stop. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.close)

    async def run_forever(self) -> None:
        """Serve until canceled."""
        await self.start()
        try:
            await asyncio.Event().wait()
        finally:
            await self.stop()

    def __getattribute__(self, name: str) -> object:
        # Every method of a store is that of the store that is served.
        if name in METHODS:
            return getattr(object.__getattribute__(self, "_store"), name)
        return object.__getattribute__(self, name)


def build_app(store: LightningStore, token: str) -> ASGIApp:
    """Build the ASGI app: a POST for each method, and a health check.

    Plain ASGI: for requests this small, a framework would take as long as the store.
    """
    expected = f"Bearer {token}".encode()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path == HEALTH:
            status, body = 200, b'{"status": "ok"}'
        elif not hmac.compare_digest(_find_header(scope, b"authorization"), expected):
            status, body = _refuse(
                401, "send the store's token: WHET_STORE_TOKEN, or .whet/store.token"
            )
        elif not path.startswith(PREFIX) or (name := path.removeprefix(PREFIX)) not in METHODS:
            status, body = _refuse(404, f"unknown method {path.removeprefix(PREFIX)!r}")
        elif scope["method"] != "POST":
            status, body = _refuse(405, f"send a POST to {path}")
        elif (read := await _read_body(receive)) is None:
            status, body = _refuse(413, f"the body is larger than {MAX_BODY_BYTES // 2**20} MiB")
        else:
            status, body = await _call(store, METHODS[name], read)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


async def _call(store: LightningStore, method: Method, body: bytes) -> tuple[int, bytes]:
    try:
        arguments = method.load(body)
        if method.name == "wait_for_rollouts":
            timeout = arguments.get("timeout")
            arguments["timeout"] = MAX_WAIT_S if timeout is None else min(timeout, MAX_WAIT_S)
        result = await getattr(store, method.name)(**arguments)
        return 200, method.dump_result(arguments, result)
    except ValueError as error:  # pydantic's errors are too
        return _refuse(400, str(error))
    except WhetError as error:
        return _refuse(503, str(error))


async def _read_body(receive: Receive) -> bytes | None:
    """Return the body of a request; None if it is too large."""
    parts: list[bytes] = []
    size, is_complete = 0, False
    while not is_complete:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b""
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            return None
        is_complete = not message.get("more_body", False)
    return b"".join(parts)


def _find_header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _refuse(status: int, message: str) -> tuple[int, bytes]:
    return status, json.dumps({"error": message}).encode()
