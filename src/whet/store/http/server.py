"""HTTP server of a store: authenticate, parse, dispatch by the table, respond."""

import asyncio
import hashlib
import hmac
import logging
import os
import re
import tempfile
import time
import zipfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from whet.errors import ConfigError, NotFound, StoreClosed, StoreError, WhetError, boundary
from whet.io.http_client import is_loopback
from whet.io.server import AppServer
from whet.store import DEFAULT_RUN
from whet.store.codec import to_json_fast
from whet.store.http import rpc, telemetry
from whet.store.http.bodies import DEFAULT_LIMITS, Limits, read_archive, read_body
from whet.store.http.errors import (
    CODES,
    ErrorBody,
    ErrorDetail,
    HttpError,
    RefusedRequest,
    is_fault,
    to_http,
)
from whet.store.http.long_poll import LongPolls
from whet.store.http.metrics import CONTENT_TYPE, ServerMetrics
from whet.store.http.openapi import build_document
from whet.store.http.rpc import ARCHIVE, JSON, METHODS, BatchResult, RemoteMethod
from whet.store.http.telemetry import ReadKey, read_no_key
from whet.store.sql_store import SQLStore

logger = logging.getLogger(__name__)

RequestHandler = Callable[[Request], Awaitable[Response]]
Arguments = Mapping[str, Any]  # Any: validated by the method's model

GZIP_FROM = 1024
"""Bytes of the smallest response worth compressing."""
SMALL_ARCHIVE = 256 * 2**20
MAX_COMPRESSION = 100
"""Ratio by which a larger archive may unpack."""


class ServerBug(WhetError):
    """Unexpected exception in a handler."""


class StoreServer:
    """A store served at `url`, which accepts connections once this exists."""

    def __init__(
        self,
        store: SQLStore,
        *,
        token: str | None,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: Limits = DEFAULT_LIMITS,
        read_key: ReadKey = read_no_key,
        wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    ) -> None:
        """Without a token every process on this machine has access.

        `read_key` checks the API keys of attempts, which may send their own traces. `wrap` adds
        other pages around the application.

        Raises:
            ConfigError: it cannot listen there, or not without a token.
        """
        if not token and not is_loopback(host):
            raise ConfigError(f"serving a store at {host}, beyond this machine, needs a token")
        self.metrics = ServerMetrics()
        self._app = StoreApp(store, token, limits, self.metrics, read_key)
        self._server = AppServer(wrap(self._app.build()), host=host, port=port, name="store")
        self.url = self._server.url

    @property
    def held(self) -> int:
        """Number of long polls in progress."""
        return len(self._app.long_polls)

    def close(self) -> None:
        """End long polls, finish the requests in progress, then stop. Idempotent."""
        self._app.long_polls.close()
        self._server.close()


class StoreApp:
    """The operations of a store as a Starlette application."""

    def __init__(
        self,
        store: SQLStore,
        token: str | None,
        limits: Limits,
        metrics: ServerMetrics,
        read_key: ReadKey = read_no_key,
    ) -> None:
        self.long_polls = LongPolls()
        self._store = store
        self._token = _digest(token) if token else None
        self._limits = limits
        self._metrics = metrics
        self._read_key = read_key

    def build(self) -> Starlette:
        """Return the application."""
        special = {"export": self._export, "load": self._load}
        operations = [
            self._route(
                row.verb, row.path, row.name, special.get(row.name) or partial(self._operate, row)
            )
            for row in METHODS.values()
        ]
        return Starlette(
            routes=[
                *operations,
                *(
                    self._route("POST", path, "traces", self._receive_traces)
                    for path in telemetry.PATHS
                ),
                self._route("GET", "/health", "health", self._report_health),
                self._route("GET", "/metrics", "metrics", self._read_metrics),
                self._route("GET", "/openapi.json", "openapi", _read_document),
            ],
            exception_handlers={HTTPException: _refuse_route},
            middleware=[Middleware(GZipMiddleware, minimum_size=GZIP_FROM, compresslevel=1)],
        )

    # ------------------------------------------------------------------ operations

    async def _operate(self, method: RemoteMethod[Any], request: Request) -> Response:
        """Call a method of the table and respond with its result."""
        store, path = self._open(request)
        key = _read_idempotency_key(request) if method.keyed else ""
        if key and not method.polls:  # the same key at another method is another request
            key = f"{method.name}-{key}"
        if method.batched:
            batch = rpc.parse_json(method.body, await read_body(request, self._limits))
            return _respond(await self._call_each(method, store, key, batch.items))
        arguments = {**path, **await self._read_arguments(method, request)}
        if key:
            store = store.idempotent(key)
        if method.polls and arguments["wait_s"]:
            poll = partial(self._poll, method, store, arguments)
            return await self.long_polls.wait(request, poll)
        result = await self._call(method, store, arguments)
        return Response(status_code=204) if method.is_silent else _respond(result)

    def _open(self, request: Request) -> tuple[SQLStore, dict[str, str | int]]:
        """Authenticate; return the run's store and the other path parameters."""
        self._check_token(request)
        path = _read_path(request)
        return self._store.for_run(str(path.pop("run", DEFAULT_RUN))), path

    async def _read_arguments(self, method: RemoteMethod[Any], request: Request) -> Arguments:
        if method.verb == "POST":
            body = await read_body(request, self._limits)
            return dict(rpc.parse_json(method.body, body or b"{}"))
        return dict(method.request.model_validate(dict(request.query_params)))

    async def _call(self, method: RemoteMethod[Any], store: SQLStore, arguments: Arguments) -> Any:
        try:
            result = await method.call(store, arguments)
        except StoreError as error:
            self._metrics.count_call(method.name, arguments, error)
            raise
        self._metrics.count_call(method.name, arguments, result)
        return result

    async def _call_each(
        self, method: RemoteMethod[Any], store: SQLStore, key: str, items: Sequence[BaseModel]
    ) -> BatchResult:
        """Call for all items at once, so that they share a commit; each fails by itself."""
        stores = [store.idempotent(f"{key}-{n}") if key else store for n in range(len(items))]
        calls = [
            self._call(method, each, dict(item)) for each, item in zip(stores, items, strict=True)
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        return BatchResult(errors=tuple(map(_build_refusal, results)))

    async def _poll(
        self, method: RemoteMethod[Any], store: SQLStore, arguments: Arguments
    ) -> Response:
        if "wait_s" in method.parameters:  # the method has its own limit
            return _respond(await self._call(method, store, arguments))
        own = {name: value for name, value in arguments.items() if name != "wait_s"}
        with anyio.move_on_after(arguments["wait_s"]):
            result = await self._call(method, store, own)
            return Response(status_code=204) if method.is_silent else _respond(result)
        return Response(status_code=202)

    async def _export(self, request: Request) -> Response:
        store, _ = self._open(request)
        file = _create_temporary()
        try:
            await store.export(file)
        except BaseException:
            file.unlink(missing_ok=True)
            raise
        return FileResponse(file, media_type=ARCHIVE, background=BackgroundTask(file.unlink))

    async def _load(self, request: Request) -> Response:
        store, _ = self._open(request)
        if key := _read_idempotency_key(request):
            store = store.idempotent(f"load-{key}")
        file = _create_temporary()
        try:
            async with await anyio.open_file(file, "wb") as out:
                async for chunk in read_archive(request, self._limits):
                    await out.write(chunk)
            await to_thread.run_sync(_check_archive, file, self._limits.archive)
            await _load_archive(store, file)
        finally:
            file.unlink(missing_ok=True)
        return Response(status_code=204)

    # ------------------------------------------------------------------ other endpoints

    async def _receive_traces(self, request: Request) -> Response:
        run = str(_read_path(request).get("run", DEFAULT_RUN))
        is_trusted = self._has_token(request)
        sender = telemetry.identify_sender(request, run, is_trusted, self._read_key)
        store = self._store.for_run(run)
        return await telemetry.ingest_traces(request, store, sender, self._limits, self._metrics)

    async def _report_health(self, request: Request) -> Response:
        await self._store.steps(limit=0)  # raises if the store cannot be read
        return Response('{"status":"ok"}', media_type=JSON)

    async def _read_metrics(self, request: Request) -> Response:
        self._check_token(request)
        overview = await self._store.overview()
        text = self._metrics.text(overview, len(self.long_polls), self._store.expired_leases)
        return Response(text, media_type=CONTENT_TYPE)

    # ------------------------------------------------------------------ around every endpoint

    def _check_token(self, request: Request) -> None:
        if not self._has_token(request):
            raise RefusedRequest(
                401,
                "the token is missing or wrong: send 'Authorization: Bearer TOKEN'",
            )

    def _has_token(self, request: Request) -> bool:
        if self._token is None:
            return True
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        # Digests are compared, so that the time reveals nothing of the token, not even its length.
        genuine = hmac.compare_digest(_digest(token.strip()), self._token)
        return scheme.lower() == "bearer" and genuine

    def _route(self, verb: str, path: str, name: str, handle: RequestHandler) -> Route:
        """Route with error responses and metrics around a handler."""

        async def endpoint(request: Request) -> Response:
            began = time.monotonic()
            try:
                with boundary(ServerBug, "the server failed"):
                    response = await _handle(handle, request)
            except ServerBug as error:
                logger.exception("request crashed path=%s", request.url.path)
                response = _refuse(HttpError(500, ErrorDetail(code="crashed", message=str(error))))
            self._metrics.count_request(name, response.status_code, time.monotonic() - began)
            return response

        return Route(path, endpoint, methods=[verb])


# ----------------------------------------------------------------------------- requests


def _read_path(request: Request) -> dict[str, str | int]:
    """Return the path parameters. Raises NotFound for one that names nothing."""
    for name, value in request.path_params.items():
        if re.fullmatch(rpc.PATH_PATTERNS[name], value) is None:
            raise NotFound(f"there is no {name} {value!r}")
    return {
        name: int(value) if name in ("step", "version") else value
        for name, value in request.path_params.items()
    }


def _read_idempotency_key(request: Request) -> str:
    key = request.headers.get("idempotency-key", "")
    if key and rpc.KEY.fullmatch(key) is None:
        raise RefusedRequest(
            400, f"invalid Idempotency-Key {key[:64]!r}: expected {rpc.KEY.pattern}"
        )
    return key


def _check_archive(file: Path, limit: int) -> None:
    """Raise RefusedRequest for one that would unpack to much more than runs do."""
    with suppress(zipfile.BadZipFile), zipfile.ZipFile(file) as archive:  # `load` refuses others
        # A member is read no further than the size it claims.
        size = sum(member.file_size for member in archive.infolist())
        if size > min(limit, max(SMALL_ARCHIVE, MAX_COMPRESSION * file.stat().st_size)):
            raise RefusedRequest(413, f"the archive would unpack to {size} bytes")


async def _load_archive(store: SQLStore, file: Path) -> None:
    try:
        await store.load(file)
    except StoreError as error:  # the client knows the file by another name
        message = str(error).replace(repr(str(file)), "the archive")
        raise type(error)(message) from error.__cause__


def _create_temporary() -> Path:
    handle, name = tempfile.mkstemp(prefix="whet-", suffix=".zip")
    os.close(handle)
    return Path(name)


# ----------------------------------------------------------------------------- responses


def _respond(value: Any) -> Response:  # Any: what the method returns
    return Response(to_json_fast(value), media_type=JSON)


def _build_refusal(result: object) -> ErrorDetail | None:
    """Return the error of a batch's item; a fault of the store fails the batch."""
    if isinstance(result, StoreError) and not is_fault(result):
        return to_http(result).detail
    if isinstance(result, BaseException):
        raise result
    return None


async def _handle(handle: RequestHandler, request: Request) -> Response:
    try:
        return await handle(request)
    except (StoreError, ValidationError) as error:
        refusal = to_http(error)
        if refusal.status >= 500 and not isinstance(error, StoreClosed):  # or nobody waits for it
            logger.warning("request failed path=%s error=%s", request.url.path, error)
        return _refuse(refusal)


async def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = CODES.get(error.status_code, "malformed")
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = _refuse(HttpError(error.status_code, ErrorDetail(code=code, message=message)))
    response.headers.update(error.headers or {})
    return response


def _refuse(error: HttpError) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    content = to_json_fast(ErrorBody(error=error.detail))
    return Response(content, error.status, headers, media_type=JSON)


async def _read_document(request: Request) -> Response:
    return _respond(build_document())


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
