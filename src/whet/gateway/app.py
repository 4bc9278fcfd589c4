"""The HTTP side of the gateway: paths, bodies, callers and errors."""

import hashlib
import re
import secrets
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whet.config import GatewayConfig
from whet.errors import NotFound, WhetError
from whet.gateway.asgi import Handler, Reply, Request, Route, Router
from whet.gateway.attribution import Caller, Unauthorized, read_caller
from whet.gateway.calls import Source
from whet.gateway.delivery import Answer, JsonReply, refusal, tell
from whet.gateway.dialects.chat import ChatDialect
from whet.gateway.dialects.completions import CompletionsDialect
from whet.gateway.dialects.dialect import Dialect, Json, Told, validate
from whet.gateway.dialects.messages import CountRequest, MessagesDialect
from whet.gateway.dialects.parts import openai_error
from whet.gateway.dialects.responses import ResponsesDialect
from whet.gateway.dialects.responses_items import find_response
from whet.gateway.dialects.responses_lookup import list_input, show_response
from whet.gateway.dialects.tokenize import DetokenizeRequest, TokenizeRequest
from whet.gateway.graph import Graph
from whet.gateway.reports import report_routes
from whet.gateway.service import Service
from whet.types import Attempt, AttemptId

RETRY_HEADER = "x-stainless-retry-count"

PREFIX = re.compile(
    r"(?:/rollout/(?P<rollout>[^/]+)/attempt/(?P<attempt>[^/]+)(?:/agent/(?P<agent>[^/]+))?)?"
    r"(?:/v1){0,2}(?=/)"
)
"""An attempt's own path, or none. Clients that add `/v1` to a base URL which has it already are
understood, and so are those that leave it out."""


def build_app(service: Service, secret: bytes, config: GatewayConfig) -> ASGIApp:
    """The endpoint: under an attempt's own path, or at the root by the API key."""
    return serve_routes(_Gateway(service, secret, config).routes())


def serve_routes(routes: list[Route]) -> ASGIApp:
    """An app of some routes, each behind any path that an attempt may have."""
    router = Router(PREFIX, routes)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        begun = False

        async def say(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await (await _reply(router.find(request), request)).deliver(request, say)
        except Exception:
            if not begun:
                told = Told(500, "internal_error", "the gateway failed; its log says why")
                await JsonReply(openai_error(told), told.status).deliver(request, say)
            raise  # for the server to log

    return app


class _Gateway:
    def __init__(self, service: Service, secret: bytes, config: GatewayConfig) -> None:
        self._service = service
        self._secret = secret
        self._config = config

    def routes(self) -> list[Route]:
        messages = MessagesDialect()
        dialects = (ChatDialect(), messages, ResponsesDialect(), CompletionsDialect())
        return [
            *(Route("POST", each.path, self._turns(each)) for each in dialects),
            Route("POST", "/messages/count_tokens", self._count(messages)),
            Route("GET", "/responses/{id}/input_items", self._responses(list_input)),
            Route("DELETE", "/responses/{id}", self._delete_response),
            Route("GET", "/responses/{id}", self._responses(self._show_response)),
            Route("GET", "/models", self._models),
            Route("GET", "/models/{id:path}", self._model),
            Route("POST", "/tokenize", self._tokenize),
            Route("POST", "/detokenize", self._detokenize),
            Route("GET", "/health", _health(secrets.token_hex(8))),
            *report_routes(self._service.log, self._attempt),
        ]

    def _turns(self, dialect: Dialect) -> Handler:
        """One turn in a wire format: parse, find and render, then sample, record, reply."""

        async def turn(request: Request) -> Reply:
            caller = self._caller(request)
            body = await request.body()
            asked = dialect.parse(body)
            self._check_model(asked.model)
            attempt, graph = await self._service.find(caller.attempt)
            source = _source(request, body, caller, attempt, dialect.name, asked.model)
            prompt = await self._service.prompt(source, asked.ask(graph), graph)
            reply = asked.reply(prompt, self._service.renderer.template)
            return Answer(dialect, self._service, prompt, reply)

        return _telling(dialect, turn)

    def _count(self, dialect: Dialect) -> Handler:
        """How long the prompt of a message would be, exactly: with what is stored already."""

        async def count(request: Request) -> Reply:
            caller = self._caller(request)
            body = await request.body()
            asked = validate(CountRequest, body)
            self._check_model(asked.model)
            attempt, graph = await self._service.find(caller.attempt)
            source = _source(request, body, caller, attempt, "count", asked.model)
            prompt = await self._service.prompt(source, asked.ask(), graph)
            return JsonReply({"input_tokens": len(prompt.tokens)})

        return _telling(dialect, count)

    def _responses(self, look: Callable[[Graph, str, Request], Json]) -> Handler:
        """Something about a stored response of the attempt."""

        async def handle(request: Request) -> Reply:
            caller = self._caller(request)
            _, graph = await self._service.find(caller.attempt)
            return JsonReply(look(graph, str(request.params["id"]), request))

        return handle

    def _show_response(self, graph: Graph, id: str, request: Request) -> Json:
        return show_response(graph, id, request, self._service.renderer.template)

    async def _delete_response(self, request: Request) -> Reply:
        _, graph = await self._service.find(self._caller(request).attempt)
        id = str(request.params["id"])
        await self._service.delete(find_response(graph, id))
        return JsonReply({"id": id, "object": "response", "deleted": True})

    async def _models(self, request: Request) -> Reply:
        self._caller(request)
        names = self._service.models
        page: Json = {"object": "list", "data": [_model(name) for name in names]}
        # What Anthropic's client reads besides.
        return JsonReply(page | {"has_more": False, "first_id": names[0], "last_id": names[-1]})

    async def _model(self, request: Request) -> Reply:
        self._caller(request)
        name = str(request.params["id"])
        self._check_model(name)
        return JsonReply(_model(name))

    async def _tokenize(self, request: Request) -> Reply:
        self._caller(request)
        asked = validate(TokenizeRequest, await request.body())
        return JsonReply(asked.reply(self._service.renderer.template, self._service.context_length))

    async def _detokenize(self, request: Request) -> Reply:
        self._caller(request)
        asked = validate(DetokenizeRequest, await request.body())
        return JsonReply(asked.reply(self._service.renderer.template))

    # ------------------------------------------------------------- who asks

    def _check_model(self, name: str) -> None:
        if name not in self._service.models:
            raise NotFound(
                f"there is no model {name!r} here: this endpoint serves "
                f"{', '.join(map(repr, self._service.models))}"
            )

    def _attempt(self, request: Request) -> AttemptId | None:
        return read_caller(request, self._secret, self._config.trace_header).attempt

    def _caller(self, request: Request) -> Caller:
        caller = read_caller(request, self._secret, self._config.trace_header)
        if caller.attempt is None and not self._config.allow_unattributed:
            raise Unauthorized(
                "the call names no attempt: use the attempt's own URL or key, or send "
                f"the header {self._config.trace_header!r}"
            )
        return caller


def _source(
    request: Request, body: bytes, caller: Caller, attempt: Attempt | None, dialect: str, model: str
) -> Source:
    rollout = request.params.get("rollout")
    if attempt is not None and rollout not in (None, attempt.rollout.id):
        raise NotFound(f"attempt {attempt.id!r} is not of rollout {rollout!r}")
    return Source(
        attempt=attempt,
        dialect=dialect,
        model=model,
        agent=caller.agent,
        request=hashlib.blake2b(dialect.encode() + body, digest_size=16).hexdigest(),
        is_retry=request.header(RETRY_HEADER, "0") != "0",
        size=len(body),
    )


def _health(instance: str) -> Handler:
    """That the gateway answers, and by the instance whether it is still the one that did before."""

    async def health(request: Request) -> Reply:
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


# ------------------------------------------------------------------- errors


def _telling(dialect: Dialect, handler: Handler) -> Handler:
    """Tell errors in the words of a wire format."""

    async def handle(request: Request) -> Reply:
        try:
            return await handler(request)
        except WhetError as error:
            told = tell(error)
            return JsonReply(dialect.error(told), told.status)

    return handle


async def _reply(handler: Handler | None, request: Request) -> Reply:
    """What a handler answers; what it refuses is told as OpenAI tells it."""
    try:
        if handler is not None:
            return await handler(request)
        raise NotFound(f"no such endpoint: {request.method} {request.path}")
    except WhetError as error:
        return refusal(error)
