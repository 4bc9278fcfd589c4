"""The HTTP side of the gateway: who is asking, and how errors are told."""

import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

from anyio import CancelScope, create_task_group
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from whet.errors import EngineError, LeaseLost, NotFound, PromptTooLong, RequestError, WhetError
from whet.gateway import keys
from whet.gateway.dialects import chat
from whet.gateway.dialects.chat_reply import ChatReply
from whet.gateway.service import Prompt, Service
from whet.protocols import AttemptLog
from whet.types import Attempt, AttemptId, Piece

logger = logging.getLogger(__name__)

BODY_LIMIT = 32 * 2**20

STATUS: list[tuple[type[WhetError], int, str]] = [
    (PromptTooLong, 400, "context_length_exceeded"),
    (RequestError, 400, "invalid_request"),
    (NotFound, 404, "not_found"),
    (LeaseLost, 409, "attempt_ended"),
    (EngineError, 503, "engine_error"),
]
"""How our errors are told: the first that fits."""


class Unauthorized(WhetError):
    """No key, or one we did not mint."""


def build_app(service: Service, log: AttemptLog, secret: bytes) -> Starlette:
    """The endpoint: under `/rollout/<id>/attempt/<id>/v1`, or under `/v1` by the API key."""
    gateway = _Gateway(service, log, secret)
    routes = [
        Route(f"{prefix}/v1{path}", handler, methods=[method])
        for prefix in ("", "/rollout/{rollout}/attempt/{attempt}")
        for path, method, handler in (
            ("/chat/completions", "POST", gateway.chat_completions),
            ("/models", "GET", gateway.models),
        )
    ]
    handlers = {404: _no_such_path, 405: _no_such_path}
    return Starlette(routes=routes, exception_handlers={**handlers, WhetError: _told})


class _Gateway:
    def __init__(self, service: Service, log: AttemptLog, secret: bytes) -> None:
        self._service = service
        self._log = log
        self._secret = secret

    async def models(self, request: Request) -> Response:
        self._attempt_id(request)
        model = {"id": self._service.policy, "object": "model", "created": 0, "owned_by": "whet"}
        return JSONResponse({"object": "list", "data": [model]})

    async def chat_completions(self, request: Request) -> Response:
        """One turn: parse, find and render, sample, record, reply."""
        attempt = await self._attempt(request)
        asked = chat.parse(await _body(request))
        if asked.model != self._service.policy:
            raise NotFound(
                f"there is no model {asked.model!r} here: this endpoint serves "
                f"{self._service.policy!r}"
            )
        prompt = await self._service.prompt(attempt, asked.ask())
        reply = ChatReply(asked, prompt, self._service.renderer, self._service.policy)
        if prompt.ask.stream:
            return _EventStream(self._service, prompt, reply)

        async def keep(index: int, piece: Piece) -> None:
            reply.keep(index, piece)

        async with _until_gone(request.receive):
            call = await self._service.complete(prompt, keep)
            return JSONResponse(reply.whole(call))
        return Response(status_code=499)

    async def _attempt(self, request: Request) -> Attempt:
        """The running attempt a request belongs to."""
        return await self._log.attempt(self._attempt_id(request))

    def _attempt_id(self, request: Request) -> AttemptId:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        by_key = keys.read(key.strip(), self._secret) if scheme.lower() == "bearer" else None
        if by_key is None:
            raise Unauthorized("send the attempt's API key: Authorization: Bearer <llm.api_key>")
        by_path = request.path_params.get("attempt", by_key)
        if by_path != by_key:
            raise Unauthorized(f"this API key is not of attempt {by_path!r}")
        return by_key


class _EventStream(Response):
    """Tokens go out as they are sampled; the last event waits until the call is recorded."""

    def __init__(self, service: Service, prompt: Prompt, reply: ChatReply) -> None:
        self._service = service
        self._prompt = prompt
        self._reply = reply
        self._started = False
        super().__init__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes, *, more: bool = True) -> None:
            if not self._started:
                self._started = True
                await send(_stream_start())
                data = self._reply.first() + data
            if data or not more:
                await send({"type": "http.response.body", "body": data, "more_body": more})

        async def on_piece(index: int, piece: Piece) -> None:
            await write(self._reply.piece(index, piece))

        async with _until_gone(receive):
            try:
                call = await self._service.complete(self._prompt, on_piece)
            except WhetError as error:
                status, body = _tell(error)
                if not self._started:
                    await JSONResponse(body, status)(scope, receive, send)
                    return
                await write(b"data: " + json.dumps(body).encode() + b"\n\n", more=False)
                return
            await write(self._reply.last(call), more=False)


def _stream_start() -> dict[str, object]:
    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
    return {"type": "http.response.start", "status": 200, "headers": headers}


@asynccontextmanager
async def _until_gone(receive: Callable[[], Awaitable[object]]):
    """Run the block, but stop it, and with it the sampling, once the client has gone."""

    async def watch(scope: CancelScope) -> None:
        while cast(dict[str, str], await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    async with create_task_group() as tasks:
        tasks.start_soon(watch, tasks.cancel_scope)
        yield
        tasks.cancel_scope.cancel()


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY_LIMIT:
                raise RequestError(f"the body is larger than {BODY_LIMIT // 2**20} MiB")
    except ClientDisconnect as error:
        raise RequestError("the client left before its request was whole") from error
    return bytes(body)


def _tell(error: Exception) -> tuple[int, dict[str, object]]:
    status, code = 500, "internal_error"
    if isinstance(error, Unauthorized):
        status, code = 401, "invalid_api_key"
    for kind, its_status, its_code in STATUS:
        if isinstance(error, kind):
            status, code = its_status, its_code
            break
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": str(error), "type": kind, "param": None, "code": code}}


async def _told(request: Request, error: Exception) -> Response:
    status, body = _tell(error)
    return JSONResponse(body, status)


async def _no_such_path(request: Request, error: Exception) -> Response:
    message = f"no such endpoint: {request.method} {request.url.path}"
    body = {"message": message, "type": "invalid_request_error", "param": None, "code": "not_found"}
    return JSONResponse({"error": body}, 404)
