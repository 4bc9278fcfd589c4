"""The HTTP side of the gateway: paths, bodies, callers and errors."""

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from anyio import fail_after
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from whet.config import GatewayConfig
from whet.errors import NotFound, RequestError, WhetError
from whet.gateway.attribution import Caller, Unauthorized, read_caller
from whet.gateway.delivery import Answer, JsonReply, TooLarge, TooSlow, tell
from whet.gateway.dialects.chat import ChatDialect
from whet.gateway.dialects.completions import CompletionsDialect
from whet.gateway.dialects.dialect import Dialect, Json, Told, validate
from whet.gateway.dialects.messages import CountRequest, MessagesDialect
from whet.gateway.dialects.parts import openai_error
from whet.gateway.dialects.responses import ResponsesDialect
from whet.gateway.dialects.responses_lookup import delete_response, list_input, show_response
from whet.gateway.dialects.tokenize import DetokenizeRequest, TokenizeRequest
from whet.gateway.graph import Graph
from whet.gateway.service import Service, Source
from whet.protocols import AttemptLog

BODY_LIMIT = 32 * 2**20
BODY_TIMEOUT_S = 30.0
"""A body that is not whole by then is refused: nobody holds a connection by sending slowly."""

RETRY_HEADER = "x-stainless-retry-count"

PREFIXES = (
    "/rollout/{rollout}/attempt/{attempt}/agent/{agent}",
    "/rollout/{rollout}/attempt/{attempt}",
    "",
)
VERSIONS = ("/v1/v1", "/v1", "")
"""Clients that add `/v1` to a base URL which has it already are understood, and so are those that
leave it out."""

Handler = Callable[[Request], Awaitable[Response]]


def build_app(service: Service, log: AttemptLog, secret: bytes, config: GatewayConfig) -> Starlette:
    """The endpoint: under an attempt's own path, or at the root by the API key."""
    routes = _Gateway(service, log, secret, config).routes()
    versions = [Mount(version, routes=routes) for version in VERSIONS]
    handlers = {
        404: _no_such_path,
        405: _no_such_path,
        WhetError: _told_as_openai,
        Exception: _crashed,
    }
    health = Route("/health", _health(secrets.token_hex(8)))
    return Starlette(
        routes=[health, *(Mount(prefix, routes=versions) for prefix in PREFIXES)],
        exception_handlers=handlers,
    )


class _Gateway:
    def __init__(
        self, service: Service, log: AttemptLog, secret: bytes, config: GatewayConfig
    ) -> None:
        self._service = service
        self._log = log
        self._secret = secret
        self._config = config

    def routes(self) -> Sequence[BaseRoute]:
        messages = MessagesDialect()
        dialects = (ChatDialect(), messages, ResponsesDialect(), CompletionsDialect())
        return [
            *(Route(each.path, self._turns(each), methods=["POST"]) for each in dialects),
            Route("/messages/count_tokens", self._count(messages), methods=["POST"]),
            Route("/responses/{id}/input_items", self._responses(list_input)),
            Route("/responses/{id}", self._responses(delete_response), methods=["DELETE"]),
            Route("/responses/{id}", self._responses(self._show_response)),
            Route("/models", self._models),
            Route("/models/{id:path}", self._model),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
        ]

    def _turns(self, dialect: Dialect) -> Handler:
        """One turn in a wire format: parse, find and render, then sample, record, reply."""

        async def turn(request: Request) -> Response:
            caller = self._caller(request)
            body = await _body(request)
            asked = dialect.parse(body)
            source = await self._source(caller, dialect.name, asked.model, request, body)
            graph = await self._service.graph(source.attempt)
            prompt = await self._service.prompt(source, asked.ask(graph), graph)
            reply = asked.reply(prompt, self._service.renderer.template)
            return Answer(dialect, self._service, prompt, reply)

        return _telling(dialect, turn)

    def _count(self, dialect: Dialect) -> Handler:
        """How long the prompt of a message would be, exactly: with what is stored already."""

        async def count(request: Request) -> Response:
            caller = self._caller(request)
            body = await _body(request)
            asked = validate(CountRequest, body)
            source = await self._source(caller, "count", asked.model, request, body)
            graph = await self._service.graph(source.attempt)
            prompt = await self._service.prompt(source, asked.ask(), graph)
            return JsonReply({"input_tokens": len(prompt.tokens)})

        return _telling(dialect, count)

    def _responses(self, look: Callable[[Graph, str, Request], Json]) -> Handler:
        """Something about a stored response of the attempt."""

        async def handle(request: Request) -> Response:
            caller = self._caller(request)
            attempt = await self._log.attempt(caller.attempt) if caller.attempt else None
            graph = await self._service.graph(attempt)
            return JsonReply(look(graph, request.path_params["id"], request))

        return handle

    def _show_response(self, graph: Graph, id: str, request: Request) -> Json:
        return show_response(graph, id, request, self._service.renderer.template)

    async def _models(self, request: Request) -> Response:
        self._caller(request)
        names = self._service.models
        page: Json = {"object": "list", "data": [_model(name) for name in names]}
        # What Anthropic's client reads besides.
        return JsonReply(page | {"has_more": False, "first_id": names[0], "last_id": names[-1]})

    async def _model(self, request: Request) -> Response:
        self._caller(request)
        self._check_model(request.path_params["id"])
        return JsonReply(_model(request.path_params["id"]))

    async def _tokenize(self, request: Request) -> Response:
        self._caller(request)
        asked = validate(TokenizeRequest, await _body(request))
        return JsonReply(asked.reply(self._service.renderer.template, self._service.context_length))

    async def _detokenize(self, request: Request) -> Response:
        self._caller(request)
        asked = validate(DetokenizeRequest, await _body(request))
        return JsonReply(asked.reply(self._service.renderer.template))

    # ------------------------------------------------------------- who asks

    async def _source(
        self, caller: Caller, dialect: str, model: str, request: Request, body: bytes
    ) -> Source:
        self._check_model(model)
        attempt = await self._service.attempt(caller.attempt) if caller.attempt else None
        rollout = request.path_params.get("rollout")
        if attempt is not None and rollout not in (None, attempt.rollout.id):
            raise NotFound(f"attempt {attempt.id!r} is not of rollout {rollout!r}")
        return Source(
            attempt=attempt,
            dialect=dialect,
            model=model,
            agent=caller.agent,
            request=hashlib.blake2b(dialect.encode() + body, digest_size=16).hexdigest(),
            is_retry=request.headers.get(RETRY_HEADER, "0") != "0",
            size=len(body),
        )

    def _check_model(self, name: str) -> None:
        if name not in self._service.models:
            raise NotFound(
                f"there is no model {name!r} here: this endpoint serves "
                f"{', '.join(map(repr, self._service.models))}"
            )

    def _caller(self, request: Request) -> Caller:
        caller = read_caller(request, self._secret, self._config.trace_header)
        if caller.attempt is None and not self._config.allow_unattributed:
            raise Unauthorized(
                "the call names no attempt: use the attempt's own URL or key, or send "
                f"the header {self._config.trace_header!r}"
            )
        return caller


def _health(instance: str) -> Handler:
    """That the gateway answers, and by the instance whether it is still the one that did before."""

    async def health(request: Request) -> Response:
        return JsonReply({"status": "ok", "instance": instance})

    return health


def _model(name: str) -> Json:
    """A model in the words of both OpenAI and Anthropic, whose clients ask at the same path."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "whet",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }


async def _body(request: Request) -> bytes:
    """The whole body. Raises RequestError for one that is too large, too slow or cut off."""
    large = TooLarge(f"the body is larger than {BODY_LIMIT // 2**20} MiB")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and len(length) < 20 and int(length) > BODY_LIMIT:
        raise large
    body = bytearray()
    try:
        with fail_after(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > BODY_LIMIT:
                    raise large
    except TimeoutError as error:
        raise TooSlow(f"the body was not whole after {BODY_TIMEOUT_S:.0f} s") from error
    except ClientDisconnect as error:
        raise RequestError("the client left before its request was whole") from error
    return bytes(body)


# ------------------------------------------------------------------- errors


def _telling(dialect: Dialect, handler: Handler) -> Handler:
    """Tell errors in the words of a wire format."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except WhetError as error:
            told = tell(error)
            return JsonReply(dialect.error(told), told.status)

    return handle


async def _told_as_openai(request: Request, error: Exception) -> Response:
    told = tell(cast(WhetError, error))
    return JsonReply(openai_error(told), told.status)


async def _no_such_path(request: Request, error: Exception) -> Response:
    told = Told(404, "not_found", f"no such endpoint: {request.method} {request.url.path}")
    return JsonReply(openai_error(told), told.status)


async def _crashed(request: Request, error: Exception) -> Response:
    told = Told(500, "internal_error", "the gateway failed; its log says why")
    return JsonReply(openai_error(told), told.status)
