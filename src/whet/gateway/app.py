"""The HTTP side of the gateway: routes, bodies, errors, and clients that vanish."""

import hashlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import cast

from anyio import CancelScope, create_task_group
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from whet.config import GatewayConfig
from whet.errors import EngineError, LeaseLost, NotFound, PromptTooLong, RequestError, WhetError
from whet.gateway.attribution import Caller, Unauthorized, read_caller
from whet.gateway.dialects.chat import ChatDialect, openai_error
from whet.gateway.dialects.dialect import Asked, Dialect, Reply, Told
from whet.gateway.messages import Message
from whet.gateway.service import Prompt, Service, Source
from whet.gateway.text import TextStream
from whet.protocols import AttemptLog
from whet.types import Call, Piece

logger = logging.getLogger(__name__)

BODY_LIMIT = 32 * 2**20
RETRY_HEADER = "x-stainless-retry-count"

PREFIXES = (
    "",
    "/rollout/{rollout}/attempt/{attempt}",
    "/rollout/{rollout}/attempt/{attempt}/agent/{agent}",
)

STATUS: list[tuple[type[WhetError], int, str]] = [
    (Unauthorized, 401, "invalid_api_key"),
    (PromptTooLong, 400, "context_length_exceeded"),
    (RequestError, 400, "invalid_request"),
    (NotFound, 404, "not_found"),
    (LeaseLost, 409, "attempt_ended"),
    (EngineError, 503, "engine_error"),
]
"""How our errors are told: the first that fits."""


def build_app(service: Service, log: AttemptLog, secret: bytes, config: GatewayConfig) -> Starlette:
    """The endpoint: under an attempt's own path, or under `/v1` by the API key."""
    gateway = _Gateway(service, log, secret, config)
    dialects: Sequence[Dialect] = (ChatDialect(),)
    routes = [
        Route(f"{prefix}/v1{dialect.path}", gateway.handler(dialect), methods=["POST"])
        for prefix in PREFIXES
        for dialect in dialects
    ]
    routes += [Route(f"{prefix}/v1/models", gateway.models) for prefix in PREFIXES]
    handlers = {404: _no_such_path, 405: _no_such_path, WhetError: _told_as_openai}
    return Starlette(routes=routes, exception_handlers=handlers)


class _Gateway:
    def __init__(
        self, service: Service, log: AttemptLog, secret: bytes, config: GatewayConfig
    ) -> None:
        self._service = service
        self._log = log
        self._secret = secret
        self._config = config

    async def models(self, request: Request) -> Response:
        self._caller(request)
        models = [
            {"id": name, "object": "model", "created": 0, "owned_by": "whet"}
            for name in self._service.models
        ]
        return JSONResponse({"object": "list", "data": models})

    def handler(self, dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        """One turn in a wire format: parse, find and render, sample, record, reply."""

        async def handle(request: Request) -> Response:
            try:
                return await self._turn(dialect, request)
            except WhetError as error:
                told = _tell(error)
                return JSONResponse(dialect.error(told), told.status)

        return handle

    async def _turn(self, dialect: Dialect, request: Request) -> Response:
        caller = self._caller(request)
        body = await _body(request)
        asked = dialect.parse(body)
        source = await self._source(caller, dialect, request, asked, body)
        graph = await self._service.graph(source.attempt)
        prompt = await self._service.prompt(source, asked.ask(graph), graph)
        reply = asked.reply(prompt, self._service.renderer.template)
        if prompt.ask.stream:
            return _EventStream(dialect, self._service, prompt, reply)
        tops: list[list[tuple[tuple[int, float], ...]]] = [[] for _ in range(prompt.ask.n)]

        async def keep(index: int, piece: Piece) -> None:
            tops[index] += piece.top

        async with _until_gone(request.receive):
            call = await self._service.complete(prompt, keep)
            return _Delivered(reply.whole(call, tops), self._service, prompt)
        return Response(status_code=499)

    async def _source(
        self, caller: Caller, dialect: Dialect, request: Request, asked: Asked, body: bytes
    ) -> Source:
        if asked.model not in self._service.models:
            raise NotFound(
                f"there is no model {asked.model!r} here: this endpoint serves "
                f"{', '.join(map(repr, self._service.models))}"
            )
        attempt = await self._log.attempt(caller.attempt) if caller.attempt else None
        digest = hashlib.blake2b(dialect.name.encode() + body, digest_size=16).hexdigest()
        return Source(
            attempt=attempt,
            dialect=dialect.name,
            model=asked.model,
            agent=caller.agent,
            request=digest,
            is_retry=request.headers.get(RETRY_HEADER, "0") != "0",
        )

    def _caller(self, request: Request) -> Caller:
        caller = read_caller(request, self._secret, self._config.trace_header)
        if caller.attempt is None and not self._config.allow_unattributed:
            raise Unauthorized(
                "the call names no attempt: use the attempt's own URL or key, or send "
                f"the header {self._config.trace_header!r}"
            )
        return caller


class _Delivered(JSONResponse):
    """A reply that notes when the client has it."""

    def __init__(self, body: object, service: Service, prompt: Prompt) -> None:
        super().__init__(body)
        self._service = service
        self._prompt = prompt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)
        self._service.delivered(self._prompt)


class _EventStream(Response):
    """Tokens go out as they are sampled; the last event waits until the call is recorded."""

    def __init__(self, dialect: Dialect, service: Service, prompt: Prompt, reply: Reply) -> None:
        self._dialect = dialect
        self._service = service
        self._prompt = prompt
        self._reply = reply
        self._started = False
        self._texts = [
            TextStream(service.renderer, prompt.sampling, tools=prompt.ask.calls_tools)
            for _ in range(prompt.ask.n)
        ]
        super().__init__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def on_piece(index: int, piece: Piece) -> None:
            delta = self._texts[index].feed(piece.tokens)
            await self._write(send, self._reply.piece(index, piece, delta))

        async with _until_gone(receive):
            try:
                call = await self._service.complete(self._prompt, on_piece)
            except WhetError as error:
                told = _tell(error)
                if self._started:
                    await self._write(send, self._dialect.error_event(told), more=False)
                else:
                    refusal = JSONResponse(self._dialect.error(told), told.status)
                    await refusal(scope, receive, send)
                return
            await self._write(send, self._last(call), more=False)
            self._service.delivered(self._prompt)

    def _last(self, call: Call) -> bytes:
        messages = (Message.from_json(g.message) for g in call.generations)
        rest = [text.finish(m) for text, m in zip(self._texts, messages, strict=True)]
        return self._reply.last(call, rest)

    async def _write(self, send: Send, data: bytes, *, more: bool = True) -> None:
        if not self._started:
            self._started = True
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            data = self._reply.first() + data
        if data or not more:
            await send({"type": "http.response.body", "body": data, "more_body": more})


@asynccontextmanager
async def _until_gone(receive: Callable[[], Awaitable[object]]) -> AsyncGenerator[None]:
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


def _tell(error: WhetError) -> Told:
    for kind, status, code in STATUS:
        if isinstance(error, kind):
            return Told(status, code, str(error))
    logger.error("call failed error=%s", error)
    return Told(500, "internal_error", str(error))


async def _told_as_openai(request: Request, error: Exception) -> Response:
    told = _tell(cast(WhetError, error))
    return JSONResponse(openai_error(told), told.status)


async def _no_such_path(request: Request, error: Exception) -> Response:
    told = Told(404, "not_found", f"no such endpoint: {request.method} {request.url.path}")
    return JSONResponse(openai_error(told), told.status)
