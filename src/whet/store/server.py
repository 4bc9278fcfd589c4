"""Serves a store over HTTP."""

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from pydantic import JsonValue, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from whet.errors import ConfigError, NotFound, StoreError, WhetError, boundary
from whet.serving import AppServer
from whet.store.http import bodies, frames, gzipped, telemetry, wire
from whet.store.http.bodies import DEFAULT_LIMITS, Limits
from whet.store.http.endpoints import ENDPOINTS, IN_PATHS, Asked, Endpoint, Frame
from whet.store.http.holding import Holding
from whet.store.http.loopback import is_loopback
from whet.store.http.metrics import TEXT_FORMAT, Metrics
from whet.store.http.openapi import openapi
from whet.store.http.problems import Problem, Unauthorized, tell
from whet.store.http.telemetry import ReadKey, no_keys
from whet.store.packing import to_json
from whet.store.sql import DEFAULT_RUN, SQLStore
from whet.types import Status

logger = logging.getLogger(__name__)

JSON = "application/json"
Handler = Callable[[Request], Awaitable[Response]]


class Crashed(WhetError):
    """The server has a bug."""


class StoreServer:
    """A store that is served at `url` once this exists."""

    def __init__(
        self,
        store: SQLStore,
        *,
        token: str | None,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: Limits = DEFAULT_LIMITS,
        read_key: ReadKey = no_keys,
    ) -> None:
        """Without a token whoever is on this machine may ask.

        `read_key` knows the keys of attempts, which may send their own traces.

        Raises:
            ConfigError: it cannot listen there, or nobody may without a token.
        """
        if not token and not is_loopback(host):
            raise ConfigError(f"to serve a store at {host}, beyond this machine, needs a token")
        self.metrics = Metrics()
        self._app = StoreApp(store, token, limits, self.metrics, read_key)
        self._server = AppServer(self._app.build(), host=host, port=port, name="store")
        self.url = self._server.url

    @property
    def held(self) -> int:
        """How many requests wait for something to happen."""
        return len(self._app.holding)

    def close(self) -> None:
        """Answer whoever waits, finish what is under way, then stop. Idempotent."""
        self._app.holding.close()
        self._server.close()


class StoreApp:
    """The endpoints of a store as an app."""

    def __init__(
        self,
        store: SQLStore,
        token: str | None,
        limits: Limits,
        metrics: Metrics,
        read_key: ReadKey = no_keys,
    ) -> None:
        self.holding = Holding()
        self._store = store
        self._token = _digest(token) if token else None
        self._limits = limits
        self._metrics = metrics
        self._read_key = read_key

    def build(self) -> Starlette:
        """What a server runs."""
        return Starlette(
            routes=[
                *(Route(row.path, self._handler(row), methods=[row.method]) for row in ENDPOINTS),
                *(
                    Route(path, self._telling("traces", self._traces), methods=["POST"])
                    for path in telemetry.PATHS
                ),
                Route("/health", self._telling("health", self._health)),
                Route("/metrics", self._telling("metrics", self._count)),
                Route("/openapi.json", self._telling("openapi", _document)),
            ],
            exception_handlers={HTTPException: _no_such_path},
        )

    def _handler(self, row: Endpoint[Any, Any]) -> Handler:
        """Check the caller, understand what is asked, do it, tell."""
        asks = None if row.asks is Frame else TypeAdapter[Any](row.asks)

        async def handle(request: Request) -> Response:
            self._check_token(request)
            path = _checked(request.path_params)
            asked = Asked(
                ask=await self._read(request, asks),
                store=self._store.for_run(path.get("run", DEFAULT_RUN)),
                path=path,
                request=request,
                holding=self.holding,
                metrics=self._metrics,
                limits=self._limits,
            )
            return _answer(request, await row.act(asked))

        return self._telling(row.name, handle)

    async def _read(self, request: Request, asks: TypeAdapter[Any] | None) -> object:
        if request.method != "POST":
            return asks and asks.validate_python(dict(request.query_params))
        body = await bodies.read_body(request, self._limits)
        if asks is None:
            return Frame(body)
        return asks.validate_python(wire.parse_json(body or b"{}"))

    async def _traces(self, request: Request) -> Response:
        run = _checked(request.path_params).get("run", DEFAULT_RUN)
        is_trusted = self._has_token(request)
        sender = telemetry.sender_of(request, run, is_trusted=is_trusted, read_key=self._read_key)
        store = self._store.for_run(run)
        return await telemetry.take_traces(request, store, sender, self._limits, self._metrics)

    def _check_token(self, request: Request) -> None:
        if not self._has_token(request):
            raise Unauthorized("the token is missing or wrong: send 'Authorization: Bearer TOKEN'")

    def _has_token(self, request: Request) -> bool:
        if self._token is None:
            return True
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        # Of the digests, so that the time tells nothing of the token, not even its length.
        genuine = hmac.compare_digest(_digest(token.strip()), self._token)
        return scheme.lower() == "bearer" and genuine

    async def _health(self, request: Request) -> Response:
        await self._store.steps(limit=0)  # whether it can be read
        return Response('{"status":"ok"}', media_type=JSON)

    async def _count(self, request: Request) -> Response:
        self._check_token(request)
        overview = await self._store.overview()
        rollouts = {
            (("run", run), ("status", status)): overview.rollouts.get((run, status), 0)
            for run in overview.workers
            for status in Status
        }
        workers = {(("run", run),): count for run, count in overview.workers.items()}
        text = self._metrics.text(
            rollouts=rollouts,
            workers=workers,
            held=len(self.holding),
            expired_leases=self._store.expired_leases,
        )
        return Response(text, media_type=TEXT_FORMAT)

    def _telling(self, name: str, handle: Handler) -> Handler:
        """Tell errors, and count what was told."""

        async def handle_and_tell(request: Request) -> Response:
            began = time.monotonic()
            try:
                with boundary(Crashed, "the server failed"):
                    response = await _told(handle, request)
            except Crashed as error:
                logger.exception("request crashed path=%s", request.url.path)
                response = _refuse(500, Problem(code="crashed", message=str(error)))
            self._metrics.request(name, response.status_code, time.monotonic() - began)
            return response

        return handle_and_tell


async def _document(request: Request) -> Response:
    return Response(to_json(openapi()), media_type=JSON)


def _checked(path: Mapping[str, str]) -> Mapping[str, str]:
    """What stands in the path. Raises NotFound for what cannot be there."""
    for name, value in path.items():
        if re.fullmatch(IN_PATHS[name], value) is None:
            raise NotFound(f"there is no {name} {value!r}")
    return path


async def _told(handle: Handler, request: Request) -> Response:
    try:
        return await handle(request)
    except (StoreError, ValidationError) as error:
        told = tell(error)
        if told.status >= 500:
            logger.warning("request failed path=%s error=%s", request.url.path, error)
        return _refuse(*told)


async def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "no_such_path", 405: "wrong_method"}.get(error.status_code, "malformed")
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = _refuse(error.status_code, Problem(code=code, message=message))
    response.headers.update(error.headers or {})
    return response


def _refuse(status: int, problem: Problem) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    content = to_json(wire.Refusal(error=problem))
    return Response(content, status, headers, media_type=JSON)


def _answer(request: Request, answer: object) -> Response:
    if isinstance(answer, Response):
        return answer
    if answer is None:
        return Response(status_code=204)
    if isinstance(answer, Frame):
        content, kind = answer.content, frames.FRAMED
    else:
        content, kind = to_json(cast(JsonValue, answer)).encode(), JSON
    headers = {"Vary": "Accept-Encoding"}
    if len(content) >= gzipped.PACKED_FROM and "gzip" in request.headers.get("accept-encoding", ""):
        content = gzipped.pack(content)
        headers["Content-Encoding"] = "gzip"
    return Response(content, headers=headers, media_type=kind)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
