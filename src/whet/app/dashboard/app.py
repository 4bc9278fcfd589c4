"""The dashboard as an ASGI application: static files, a read-only JSON API, live events."""

import asyncio
import functools
import hashlib
import json
import logging
import mimetypes
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from whet.app.dashboard.access import (
    CODE_PATH,
    SESSION_PATH,
    SESSION_S,
    BrowserSessions,
    Guard,
    get_cookie_name,
    refuse,
)
from whet.app.dashboard.pages import overview, rollout_list, scores
from whet.app.dashboard.pages.attempt_page import AttemptPages
from whet.app.dashboard.pages.doctor_page import read_doctor
from whet.app.dashboard.pages.payload import respond, to_browser_json
from whet.app.dashboard.run_catalog import Catalog, OpenedRun
from whet.errors import NotFound, StoreError, WhetError, boundary
from whet.store.queries import browse

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
FILES = ("index.html", "app.js", "app.css", "icon.svg")
POLL_INTERVAL_S = 1.0
"""Seconds between two polls of a run that an open page follows."""
STOP_CHECKS_PER_POLL = 4
"""Checks between two polls whether the server stops."""
KEEP_ALIVE_S = 15.0
MAX_BODY = 1000

Query = TypeVar("Query", bound=BaseModel)
PageHandler = Callable[[OpenedRun, Request], Awaitable[object]]


class InvalidQuery(WhetError):
    """A request with a parameter that is unknown or has an invalid value."""


class DashboardCrash(WhetError):
    """Unexpected exception in a handler."""


class StepQuery(BaseModel):
    """Query of the steps of a run."""

    model_config = ConfigDict(extra="forbid")

    after: int = Field(default=0, ge=0, lt=2**31)
    """The last step that is known; 0 for all."""


class DashboardApp:
    """Pages about the runs of a catalog."""

    def __init__(self, catalog: Catalog, sessions: BrowserSessions) -> None:
        self.closing = threading.Event()
        """Set when the server stops: open streams end."""
        self._catalog = catalog
        self._sessions = sessions
        self._attempts = AttemptPages()

    def build(self, *, host: str, allowed: Sequence[str] = ()) -> Starlette:
        """Return the application for a server that listens on `host`."""
        pages: dict[str, PageHandler] = {
            "": lambda run, request: overview.read_run(run),
            "/steps": _read_steps,
            "/rollouts": _read_rollouts,
            "/groups": _read_groups,
            "/rollouts/{id}": lambda run, r: self._attempts.read_rollout(run, _read_id(r)),
            "/attempts/{id}": lambda run, r: self._attempts.read_attempt(run, _read_id(r)),
            "/attempts/{id}/credit": lambda run, r: self._attempts.read_credit(run, _read_id(r)),
            "/queue": lambda run, request: overview.read_queue(run),
            "/resources": lambda run, request: overview.read_resources(run),
            "/resources/{id}": lambda run, r: overview.read_resource(run, _read_id(r)),
            "/checkpoints": lambda run, request: overview.read_checkpoints(run),
            "/evaluations": lambda run, request: scores.read_evaluations(run),
            "/rewards": lambda run, request: scores.read_reward_health(run),
            "/doctor": lambda run, request: read_doctor(run, self._attempts.vocabularies),
        }
        routes = [
            Route(f"/api/runs/{{run}}{path}", _guard(functools.partial(self._serve_page, page)))
            for path, page in pages.items()
        ]
        files = [Route(f"/{name}", _serve_file(name)) for name in FILES]
        return Starlette(
            routes=[
                Route("/", _serve_file("index.html")),
                *files,
                Route(SESSION_PATH, _guard(self._open_session), methods=["POST"]),
                Route(CODE_PATH, _guard(self._issue_code), methods=["POST"]),
                Route("/api/runs", _guard(self._list_runs)),
                Route("/api/runs/{run}/events", _guard(self._serve_events)),
                *routes,
            ],
            middleware=[
                Middleware(Guard, sessions=self._sessions, host=host, allowed=allowed),
                Middleware(GZipMiddleware, minimum_size=1024, compresslevel=5),
            ],
            exception_handlers={404: _refuse_path},
        )

    async def _serve_page(self, page: PageHandler, request: Request) -> Response:
        run = await self._catalog.open(request.path_params["run"])
        return respond(await page(run, request))

    async def _list_runs(self, request: Request) -> Response:
        return respond(await overview.list_run_cards(self._catalog))

    async def _open_session(self, request: Request) -> Response:
        """Exchange a one-time code for a cookie that only this origin sends back."""
        body = await _read_short_body(request)
        try:
            code = json.loads(body).get("code")
        except (ValueError, AttributeError):
            code = None
        value = self._sessions.open(code) if isinstance(code, str) else None
        if value is None:
            return refuse(403, "this link was used before, or is too old: `whet view` prints one")
        response = respond({"ok": True})
        response.set_cookie(
            get_cookie_name(request.scope),
            value,
            max_age=SESSION_S,
            httponly=True,
            samesite="strict",
            path="/",
        )
        return response

    async def _issue_code(self, request: Request) -> Response:
        """Return a new code to a program that has the store's token."""
        if not self._sessions.has_token(request.headers.get("authorization", "")):
            return refuse(401, "the token is missing or wrong: send 'Authorization: Bearer TOKEN'")
        return respond({"code": self._sessions.issue_code()})

    async def _serve_events(self, request: Request) -> Response:
        run = await self._catalog.open(request.path_params["run"])
        # Read once before the stream: an unreadable store is an error, not a stream.
        await run.store.browse(browse.read_change_counts)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        stream = self._stream(run)
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    async def _stream(self, run: OpenedRun) -> AsyncGenerator[bytes]:
        """Yield a message with new counts whenever the run has changed."""
        last: object = None
        written = time.monotonic()
        while True:
            try:
                counts = await run.store.browse(browse.read_change_counts)
            except StoreError:
                return
            if counts != last:
                last = counts
                yield b"data: " + to_browser_json(counts | {"now": time.time()}) + b"\n\n"
                written = time.monotonic()
            elif time.monotonic() - written > KEEP_ALIVE_S:
                yield b": alive\n\n"
                written = time.monotonic()
            for _ in range(STOP_CHECKS_PER_POLL):
                if self.closing.is_set():
                    return
                await asyncio.sleep(POLL_INTERVAL_S / STOP_CHECKS_PER_POLL)


async def _read_steps(run: OpenedRun, request: Request) -> object:
    query = _parse_query(StepQuery, request)
    return await overview.read_steps(run, query.after - 1)


async def _read_rollouts(run: OpenedRun, request: Request) -> object:
    query = _parse_query(rollout_list.RolloutQuery, request)
    return await rollout_list.read_rollouts(run, query)


async def _read_groups(run: OpenedRun, request: Request) -> object:
    query = _parse_query(rollout_list.GroupQuery, request)
    return await rollout_list.read_groups(run, query)


def _parse_query(model: type[Query], request: Request) -> Query:
    """Return the parameters of a request. Raises InvalidQuery."""
    try:
        return model.model_validate(dict(request.query_params))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise InvalidQuery(f"parameter {name!r}: {first['msg'].lower()}") from error


def _read_id(request: Request) -> str:
    return request.path_params["id"]


async def _read_short_body(request: Request) -> bytes:
    """Read a body; empty if it is longer than any valid one."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            return b""
    return body


def _guard(
    handle: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Wrap a handler: errors become responses in one line."""

    async def endpoint(request: Request) -> Response:
        try:
            with boundary(DashboardCrash, "the dashboard failed"):
                return await handle(request)
        except NotFound as error:
            return refuse(404, str(error))
        except InvalidQuery as error:
            return refuse(422, str(error))
        except DashboardCrash as error:
            logger.exception("request crashed path=%s", request.url.path)
            return refuse(500, str(error))
        except WhetError as error:
            return refuse(503, str(error))

    return endpoint


def _serve_file(name: str) -> Callable[[Request], Awaitable[Response]]:
    """Serve a file of the bundle; the browser asks each time whether it changed."""
    content = (STATIC / name).read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    headers = {"ETag": tag, "Cache-Control": "no-cache"}

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    return serve


async def _refuse_path(request: Request, error: Exception) -> Response:
    return refuse(404, f"there is no page {request.url.path[:200]!r}")
