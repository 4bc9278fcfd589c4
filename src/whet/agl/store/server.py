"""`LightningStoreServer`: serves a store over HTTP, on loopback and with a token by default."""

import asyncio
import hmac
import logging

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from whet.agl.store.base import LightningStore, LightningStoreCapabilities
from whet.agl.store.rpc import HEALTH, METHODS, PREFIX
from whet.errors import WhetError
from whet.io.server import AppServer
from whet.store.http.bodies import Limits, read_body
from whet.store.http.errors import RefusedRequest
from whet.store.http.token import make_token

logger = logging.getLogger(__name__)

LIMITS = Limits(body=64 * 2**20)
MAX_WAIT_S = 20.0
"""Longest wait within one request; clients repeat the request."""


class LightningStoreServer(LightningStore):
    """Serves a store at `endpoint` between `start` and `stop`; its own methods are the store's."""

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
        # A store method that is called on the server is that of the store it serves.
        if name in METHODS:
            return getattr(object.__getattribute__(self, "_store"), name)
        return object.__getattribute__(self, name)


def build_app(store: LightningStore, token: str) -> Starlette:
    """Build the app: a POST for each method, and a health check."""
    expected = f"Bearer {token}".encode()

    async def call(request: Request) -> Response:
        if not hmac.compare_digest(request.headers.get("authorization", "").encode(), expected):
            raise RefusedRequest(
                401, "send the store's token: WHET_STORE_TOKEN, or .whet/store.token"
            )
        method = METHODS.get(request.path_params["name"])
        if method is None:
            raise RefusedRequest(404, f"unknown method {request.path_params['name']!r}")
        arguments = method.load_arguments(await read_body(request, LIMITS))
        if method.name == "wait_for_rollouts":
            timeout = arguments.get("timeout")
            arguments["timeout"] = MAX_WAIT_S if timeout is None else min(timeout, MAX_WAIT_S)
        result = await getattr(store, method.name)(**arguments)
        return Response(method.dump_result(arguments, result), media_type="application/json")

    return Starlette(
        routes=[
            Route(HEALTH, _report_health),
            Route(PREFIX + "{name}", call, methods=["POST"]),
        ],
        exception_handlers=dict.fromkeys((ValueError, WhetError, HTTPException), _report_error),
    )


async def _report_health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _report_error(request: Request, error: Exception) -> Response:
    match error:
        case RefusedRequest():
            status = error.status
        case HTTPException():  # raised by starlette's routes
            status = error.status_code
        case ValueError():  # pydantic's errors are ValueErrors
            status = 400
        case _:
            status = 503
    return JSONResponse({"error": str(error)}, status)
