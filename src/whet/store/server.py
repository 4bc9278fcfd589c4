"""Serves a store over HTTP."""

import hashlib
import hmac
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from whet.errors import NotFound, StoreError, WhetError, boundary
from whet.serving import AppServer
from whet.store.http import bodies, wire
from whet.store.http.endpoints import ENDPOINTS, IN_PATHS, Asked, Endpoint, Frame
from whet.store.http.holding import Holding
from whet.store.http.problems import Problem, Unauthorized, tell
from whet.store.packing import to_json
from whet.store.sql import DEFAULT_RUN, SQLStore

logger = logging.getLogger(__name__)

JSON = "application/json"
PACKED_FROM = 1024
"""Smaller answers are not worth packing."""

Handler = Callable[[Request], Awaitable[Response]]


class Crashed(WhetError):
    """The server has a bug."""


class StoreServer:
    """A store that is served at `url` once this exists."""

    def __init__(
        self,
        store: SQLStore,
        *,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        body_limit: int = bodies.BODY_LIMIT,
        body_timeout_s: float = bodies.BODY_TIMEOUT_S,
    ) -> None:
        """Raises ConfigError if it cannot listen there."""
        self._app = StoreApp(store, token, body_limit=body_limit, body_timeout_s=body_timeout_s)
        self._server = AppServer(self._app.build(), host=host, port=port, name="store")
        self.url = self._server.url

    def close(self) -> None:
        """Answer whoever waits, finish what is under way, then stop. Idempotent."""
        self._app.holding.close()
        self._server.close()


class StoreApp:
    """The endpoints of a store as an app."""

    def __init__(
        self, store: SQLStore, token: str, *, body_limit: int, body_timeout_s: float
    ) -> None:
        self.holding = Holding()
        self._store = store
        self._token = _digest(token)
        self._body_limit = body_limit
        self._body_timeout_s = body_timeout_s

    def build(self) -> Starlette:
        """What a server runs."""
        return Starlette(
            routes=[
                *(
                    Route(each.path, self._handler(each), methods=[each.method])
                    for each in ENDPOINTS
                ),
                Route("/health", self._health),
            ],
            exception_handlers={HTTPException: _no_such_path},
        )

    def _handler(self, endpoint: Endpoint[Any, Any]) -> Handler:
        """Check the caller, understand what is asked, do it, tell."""
        asks = TypeAdapter[Any](endpoint.asks) if endpoint.asks is not Frame else None
        gives = (
            TypeAdapter[Any](endpoint.gives) if endpoint.gives not in (Frame, Response) else None
        )

        async def handle(request: Request) -> Response:
            self._check_token(request)
            path = _checked(request.path_params)
            asked = Asked(
                ask=await self._read(request, asks),
                store=self._store.for_run(path.get("run", DEFAULT_RUN)),
                path=path,
                request=request,
                holding=self.holding,
            )
            return _answer(request, await endpoint.act(asked), gives)

        return _telling(handle)

    async def _read(self, request: Request, asks: TypeAdapter[Any] | None) -> object:
        if request.method != "POST":
            return asks and asks.validate_python(dict(request.query_params))
        body = await bodies.read_body(
            request, limit=self._body_limit, timeout_s=self._body_timeout_s
        )
        if asks is None:
            return Frame(body)
        return asks.validate_python(wire.parse_json(body or b"{}"))

    def _check_token(self, request: Request) -> None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        # Of the digests, so that the time tells nothing of the token, not even its length.
        genuine = hmac.compare_digest(_digest(token.strip()), self._token)
        if scheme.lower() != "bearer" or not genuine:
            raise Unauthorized("the token is missing or wrong: send 'Authorization: Bearer TOKEN'")

    async def _health(self, request: Request) -> Response:
        """Whether the store can be read."""
        return await _telling(self._look)(request)

    async def _look(self, request: Request) -> Response:
        await self._store.steps(limit=0)
        return Response('{"status":"ok"}', media_type=JSON)


def _checked(path: Mapping[str, str]) -> Mapping[str, str]:
    """What stands in the path. Raises NotFound for what cannot be there."""
    for name, value in path.items():
        if re.fullmatch(IN_PATHS[name], value) is None:
            raise NotFound(f"there is no {name} {value!r}")
    return path


def _telling(handle: Handler) -> Handler:
    """Tell errors; one that is none of ours is a crash of the server."""

    async def handle_and_tell(request: Request) -> Response:
        try:
            with boundary(Crashed, request.url.path):
                return await _handled(handle, request)
        except Crashed as error:
            logger.exception("request crashed", exc_info=error)
            return _refuse(500, Problem(code="crashed", message="the server failed"))

    return handle_and_tell


async def _handled(handle: Handler, request: Request) -> Response:
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


def _answer(request: Request, answer: object, gives: TypeAdapter[Any] | None) -> Response:
    if isinstance(answer, Response):
        return answer
    if answer is None:
        return Response(status_code=204)
    if isinstance(answer, Frame):
        content, kind = answer.content, wire.FRAMED
    else:
        assert gives is not None
        content, kind = to_json(gives.dump_python(answer)).encode(), JSON
    headers = {"Vary": "Accept-Encoding"}
    if len(content) >= PACKED_FROM and "gzip" in request.headers.get("accept-encoding", ""):
        content = bodies.pack(content)
        headers["Content-Encoding"] = "gzip"
    return Response(content, headers=headers, media_type=kind)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
