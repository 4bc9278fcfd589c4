"""HTTP plumbing on Starlette: endpoints, request bodies, disconnects, attempt prefixes, errors."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from functools import lru_cache

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whet.errors import (
    EngineBusy,
    EngineError,
    LeaseLost,
    NotFound,
    PromptTooLong,
    RequestError,
    StoreError,
    WhetError,
)
from whet.gateway.auth import Unauthorized
from whet.gateway.dialects.dialect import ErrorFormat, Json, ThreadUnsupported, WireError
from whet.gateway.dialects.wire import OPENAI_ERRORS
from whet.gateway.messages import dump_json
from whet.io.attempt_url import ATTEMPT_PREFIX

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 2**20
BODY_TIMEOUT_S = 30.0
"""Time for a whole body to arrive, so that slow senders hold no connections."""
RETRY_AFTER_S = 1


class BodyTooLarge(RequestError):
    """The body is larger than the limit."""


class BodyTimeout(RequestError):
    """The body did not arrive in time."""


class UnsupportedMediaType(RequestError):
    """The body has an unknown content type."""


class ClientDisconnected(WhetError):
    """The client has disconnected; no reply is sent."""


ERRORS: list[tuple[type[WhetError], int, str]] = [
    (Unauthorized, 401, "invalid_api_key"),
    (PromptTooLong, 400, "context_length_exceeded"),
    (ThreadUnsupported, 400, "thread_unsupported_request"),
    (BodyTooLarge, 413, "request_too_large"),
    (BodyTimeout, 408, "request_timeout"),
    (UnsupportedMediaType, 415, "unsupported_media_type"),
    (RequestError, 400, "invalid_request"),
    (NotFound, 404, "not_found"),
    (LeaseLost, 409, "attempt_ended"),
    (EngineBusy, 429, "engine_busy"),
    (EngineError, 503, "engine_error"),
    (StoreError, 500, "store_error"),
]
"""Status and code of each error; the first class that fits counts."""

ERROR_HEADERS: dict[int, dict[str, str]] = {
    429: {"retry-after": str(RETRY_AFTER_S)},
    503: {"retry-after": str(RETRY_AFTER_S)},
    409: {"x-should-retry": "false"},  # which SDKs would retry otherwise
}


class GatewayRequest(Request):
    """Starlette's request with body limits, a disconnect watch, and `send` for streamed replies."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive, send)
        self.response_started = False

    async def send(self, message: Message) -> None:
        """Send an ASGI message of the response."""
        self.response_started = True
        await self._send(message)

    async def respond(self, response: Response) -> None:
        """Send a whole response."""
        await response(self.scope, self.receive, self.send)

    async def read_body(self) -> bytes:
        """Read the whole body. Raises RequestError if it is too large, too slow or incomplete."""
        length = self.headers.get("content-length", "")
        body = bytearray()
        try:
            if length.isdecimal() and len(length) < 20:  # not longer than a 64-bit number
                _check_size(int(length))
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in self.stream():
                    body += chunk
                    _check_size(len(body))
        except TimeoutError as error:
            raise BodyTimeout(f"the body was incomplete after {BODY_TIMEOUT_S:.0f} s") from error
        except ClientDisconnect as error:
            raise RequestError("the client disconnected before its request was complete") from error
        return bytes(body)

    @contextmanager
    def watch_disconnect(self) -> "Generator[DisconnectWatch]":
        """Watch for a disconnect of the client; once the body has been read."""
        watch = DisconnectWatch()
        task = asyncio.create_task(watch.run(self.receive))
        try:
            yield watch
        finally:
            task.cancel()


class DisconnectWatch:
    """Detects that a client has disconnected, and cancels the work that is done for it."""

    def __init__(self) -> None:
        self._disconnected = False
        self._work: asyncio.Task[object] | None = None
        """The task to cancel."""

    async def run(self, receive: Receive) -> None:
        """Wait for the disconnect."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._disconnected = True
        if self._work is not None:
            self._work.cancel()

    @contextmanager
    def cancel_work(self) -> Generator[None]:
        """Cancel the work inside when the client disconnects, and raise ClientDisconnected."""
        self.check_connected()
        self._work = task = asyncio.current_task()
        assert task is not None
        try:
            yield
        except asyncio.CancelledError as error:
            if self._disconnected and task.uncancel() == 0:  # else others have canceled it as well
                raise ClientDisconnected("the client disconnected") from error
            raise
        finally:
            self._work = None

    def check_connected(self) -> None:
        """Raise ClientDisconnected if the client has gone: servers drop such replies silently."""
        if self._disconnected:
            raise ClientDisconnected("the client disconnected")


def _check_size(length: int) -> None:
    if length > MAX_BODY_BYTES:
        raise BodyTooLarge(f"the body is larger than {MAX_BODY_BYTES // 2**20} MiB")


# ------------------------------------------------------------------- endpoints and errors


class JsonResponse(Response):
    """A response with a JSON body."""

    def __init__(self, value: Json, status: int = 200) -> None:
        super().__init__(dump_json(value), status, media_type="application/json")


Handler = Callable[[GatewayRequest], Awaitable[Response | None]]
"""Returns a response, or None if it has sent one itself."""


class HttpEndpoint:
    """The ASGI app of one path: calls the handler of a method and turns errors into responses."""

    def __init__(self, errors: ErrorFormat = OPENAI_ERRORS, **handlers: Handler) -> None:
        """`handlers` by method, such as `GET`."""
        self._errors = errors
        self._handlers: Mapping[str, Handler] = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = GatewayRequest(scope, receive, send)
        try:
            response = await self._find_handler(request)(request)
            if response is not None:
                await request.respond(response)
        except ClientDisconnected:
            pass
        except WhetError as error:
            await self._report(request, classify_error(error))
        except Exception:
            if not request.response_started:
                message = "the gateway failed; see its log"
                await self._report(request, WireError(500, "internal_error", message))
            raise  # for the server to log

    def _find_handler(self, request: Request) -> Handler:
        method = "GET" if request.method == "HEAD" else request.method
        if method not in self._handlers:
            raise NotFound(f"no such endpoint: {request.method} {request.state.full_path}")
        return self._handlers[method]

    async def _report(self, request: GatewayRequest, error: WireError) -> None:
        if request.response_started:
            await request.send({"type": "http.response.body", "body": self._errors.event(error)})
            return
        response = JsonResponse(self._errors.body(error), error.status)
        response.headers.update(ERROR_HEADERS.get(error.status, {}))
        await request.respond(response)


def build_route(path: str, errors: ErrorFormat = OPENAI_ERRORS, **handlers: Handler) -> Route:
    """Build the route of a path with the handlers of its methods."""
    return Route(path, HttpEndpoint(errors, **handlers))


def classify_error(error: WhetError) -> WireError:
    """Return the status, code and message of an error."""
    status, code = next(
        ((status, code) for kind, status, code in ERRORS if isinstance(error, kind)),
        (500, "internal_error"),
    )
    if status == 500:
        _log_once(str(error))
    return WireError(status, code, str(error))


@lru_cache(maxsize=64)
def _log_once(error: str) -> None:
    """Log an error the first time: one of the store, such as a full disk, may fail every call."""
    logger.error("call failed error=%s", error)


def build_router(routes: list[Route], **unknown: Handler) -> ASGIApp:
    """Build an app of endpoints, each with and without the prefix of an attempt and `/v1`.

    `unknown` are the handlers of all other paths, by method.
    """
    router = Router(routes, redirect_slashes=False, default=HttpEndpoint(OPENAI_ERRORS, **unknown))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await router(split_prefix(scope), receive, send)

    return app


def split_prefix(scope: Scope) -> Scope:
    """Move the prefix of an attempt from a request's path to its state."""
    path: str = scope["path"]
    prefix = ATTEMPT_PREFIX.match(path)
    names = prefix.groupdict() if prefix else dict.fromkeys(ATTEMPT_PREFIX.groupindex)
    state = {**scope.get("state", {}), **names, "full_path": path}
    path = path[prefix.end() if prefix else 0 :].rstrip("/") or "/"
    return {**scope, "path": path, "state": state}
