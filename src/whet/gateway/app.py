"""The gateway's HTTP endpoints: model calls in every wire format, stored responses, models."""

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress

from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from whet.config import GatewayConfig
from whet.errors import NotFound, RequestError, WhetError
from whet.gateway.auth import Caller, Unauthorized, identify_caller
from whet.gateway.dialects.anthropic import ANTHROPIC, CountRequest
from whet.gateway.dialects.chat import CHAT
from whet.gateway.dialects.completions import COMPLETIONS
from whet.gateway.dialects.dialect import Dialect, Json
from whet.gateway.dialects.responses import RESPONSES, list_input, show_response
from whet.gateway.dialects.responses_items import find_response
from whet.gateway.dialects.tokenize import DetokenizeRequest, TokenizeRequest
from whet.gateway.dialects.wire import parse_body
from whet.gateway.graph import Graph
from whet.gateway.http import (
    GatewayRequest,
    Handler,
    JsonResponse,
    build_route,
    build_router,
)
from whet.gateway.pipeline import CallPipeline
from whet.gateway.requests import RequestSource
from whet.gateway.streaming import EventStream
from whet.gateway.telemetry import Telemetry, accept_reward
from whet.io.attempt_url import is_attempt_id
from whet.io.genai_spans import build_refusal
from whet.types import JUDGE_MODEL, Attempt, AttemptId, Reward

logger = logging.getLogger(__name__)

DIALECTS = (CHAT, ANTHROPIC, RESPONSES, COMPLETIONS)

RETRY_HEADER = "x-stainless-retry-count"

OTHER_SIGNALS = ("/logs", "/metrics")
"""Paths to which OpenTelemetry exporters send logs and metrics; never meant as model calls."""

MAX_UNAUTHORIZED = 1000
"""Attempts that a gateway looks up because a call with a wrong key names them: anyone may send such
calls."""


def build_app(
    pipeline: CallPipeline,
    secret: bytes,
    config: GatewayConfig,
    check_reward: Callable[[Reward], None] = accept_reward,
    *,
    others: Sequence[CallPipeline] = (),
) -> ASGIApp:
    """Build the ASGI app; a call names its attempt by the URL's prefix, or by its API key.

    `check_reward` raises RequestError for a posted reward that nothing reads. `others` are further
    policies beside the pipeline's; a call chooses one by its model name.
    """
    gateway = _Gateway([pipeline, *others], secret, config)
    return build_router(gateway.build_routes(check_reward), POST=gateway.refuse_path)


class _Gateway:
    def __init__(
        self, pipelines: Sequence[CallPipeline], secret: bytes, config: GatewayConfig
    ) -> None:
        self._pipeline = pipelines[0]
        """Used for requests about an attempt: all pipelines share its calls."""
        self._pipelines = {name: each for each in pipelines for name in each.models}
        self._secret = secret
        self._config = config
        self._instance = secrets.token_hex(8)
        self._has_warned = False
        self._unauthorized: set[str] = set()
        """Attempts that calls with a wrong key have named."""

    def build_routes(self, check_reward: Callable[[Reward], None]) -> list[Route]:
        show = self._look_up(self._show_response)
        telemetry = Telemetry(self._pipeline.log, self._find_attempt, check_reward)
        return [
            *(self._build_call_route(dialect) for dialect in DIALECTS),
            build_route("/messages/count_tokens", ANTHROPIC.errors, POST=self._count_tokens),
            build_route("/responses/{id}/input_items", GET=self._look_up(list_input)),
            build_route("/responses/{id}", GET=show, DELETE=self._delete_response),
            build_route("/models", GET=self._list_models),
            build_route("/models/{id:path}", GET=self._show_model),
            build_route("/tokenize", POST=self._tokenize),
            build_route("/detokenize", POST=self._detokenize),
            build_route("/health", GET=self._report_health),
            build_route("/rewards", POST=telemetry.post_reward, GET=telemetry.list_rewards),
            build_route("/traces", POST=telemetry.ingest_traces),
        ]

    def _build_call_route(self, dialect: Dialect) -> Route:
        async def handle(request: GatewayRequest) -> None:
            try:
                await self._complete_call(dialect, request)
            except (RequestError, NotFound) as error:
                await self._record_refusal(request, error)
                raise
            except Unauthorized as error:
                self._warn_unauthorized(error)
                await self._record_unauthorized(request, error)
                raise

        return build_route(dialect.path, dialect.errors, POST=handle)

    async def refuse_path(self, request: GatewayRequest) -> None:
        """Refuse a request at an unknown path, which may be a model call of a running attempt."""
        error = NotFound(
            f"no such endpoint: POST {request.url.path}; model calls go to /chat/completions, "
            "/completions, /responses or /messages, after the base URL"
        )
        if request.url.path not in OTHER_SIGNALS:
            with suppress(Unauthorized):
                await self._record_refusal(request, error)
        raise error

    async def _complete_call(self, dialect: Dialect, request: GatewayRequest) -> None:
        """Serve one model call: parse, find, render, sample, record, reply."""
        caller = self._identify(request)
        body = await request.read_body()
        parsed = dialect.parse(body)
        pipeline = self._find_pipeline(parsed.model)
        attempt, graph = await pipeline.find(caller.attempt)
        source = _build_source(request, body, caller, attempt, dialect.name, parsed.model)
        call = await pipeline.render(source, parsed.to_model_request(graph), graph)
        reply = parsed.build_reply(call, pipeline.renderer.template)
        stream = None
        if call.request.stream:
            stream = EventStream(request.send, pipeline.renderer, call, reply)
        with pipeline.track_delivery(call), request.watch_disconnect() as client:
            async with stream.keep_alive() if stream else nullcontext():
                with pipeline.track_in_flight(call):
                    with client.cancel_work():
                        choices = await pipeline.sample(call, stream and stream.send_chunk)
                    # A call that is sampled is recorded even if its client has gone: it may retry.
                    completed = await pipeline.record(call, choices)
            client.check_connected()
            if stream is None:
                await request.respond(JsonResponse(reply.build_body(completed)))
            else:
                await stream.finish(completed)

    async def _record_refusal(self, request: GatewayRequest, error: WhetError) -> None:
        """Record the reason, since agents often hide it: a refused call is not a missing one."""
        attempt = self._find_attempt(request)
        if attempt is not None:
            with suppress(NotFound):  # an attempt that is unknown
                refusal = build_refusal(attempt, str(error), time.time_ns())
                await self._pipeline.log.record(attempt, [refusal])

    def _warn_unauthorized(self, error: Unauthorized) -> None:
        """Log the first call without a valid key: its URL may name no attempt."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning("a model call was refused with a 401, others may follow: %s", error)

    async def _record_unauthorized(self, request: GatewayRequest, error: Unauthorized) -> None:
        """Record the first call with a wrong key at the URL of a running attempt, to be shown.

        Nothing proves that the attempt sent it: it adds one span of our own words, and no more.
        """
        named: str = request.state.attempt or ""
        is_new = named not in self._unauthorized and len(self._unauthorized) < MAX_UNAUTHORIZED
        if not (is_new and is_attempt_id(named)):
            return
        self._unauthorized.add(named)
        with suppress(WhetError):  # unknown, ended, or no store: the reply is the same
            attempt = await self._pipeline.log.attempt(AttemptId(named))
            refusal = build_refusal(attempt.id, f"401: {error}", time.time_ns(), once="401")
            await self._pipeline.log.record(attempt.id, [refusal])

    async def _count_tokens(self, request: GatewayRequest) -> Response:
        """Count the prompt tokens of a message exactly, with those that are stored."""
        caller = self._identify(request)
        body = await request.read_body()
        parsed = parse_body(CountRequest, body)
        pipeline = self._find_pipeline(parsed.model)
        attempt, graph = await pipeline.find(caller.attempt)
        source = _build_source(request, body, caller, attempt, "count", parsed.model)
        call = await pipeline.render(source, parsed.to_model_request(), graph)
        return JsonResponse({"input_tokens": len(call.tokens)})

    # ------------------------------------------------------------- stored responses

    def _look_up(self, show: Callable[[Graph, str, QueryParams], Json]) -> Handler:
        """Build a handler that shows something of a stored response."""

        async def handle(request: GatewayRequest) -> Response:
            _, graph = await self._pipeline.find(self._identify(request).attempt)
            return JsonResponse(show(graph, request.path_params["id"], request.query_params))

        return handle

    def _show_response(self, graph: Graph, id: str, query: QueryParams) -> Json:
        model = find_response(graph, id).origin.model
        pipeline = self._pipelines.get(model, self._pipeline)
        return show_response(graph, id, query, pipeline.renderer.template)

    async def _delete_response(self, request: GatewayRequest) -> Response:
        _, graph = await self._pipeline.find(self._identify(request).attempt)
        id: str = request.path_params["id"]
        await self._pipeline.delete(find_response(graph, id))
        return JsonResponse({"id": id, "object": "response", "deleted": True})

    # ------------------------------------------------------------- models, tokens, health

    async def _list_models(self, request: GatewayRequest) -> Response:
        self._identify(request)
        names = [*self._pipelines]
        page: Json = {"object": "list", "data": [_describe_model(name) for name in names]}
        # Fields that Anthropic's client reads besides.
        page |= {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JsonResponse(page)

    async def _show_model(self, request: GatewayRequest) -> Response:
        self._identify(request)
        name: str = request.path_params["id"]
        self._find_pipeline(name)
        return JsonResponse(_describe_model(name))

    async def _tokenize(self, request: GatewayRequest) -> Response:
        self._identify(request)
        parsed = parse_body(TokenizeRequest, await request.read_body())
        pipeline = self._pipelines.get(parsed.model or "", self._pipeline)
        template, context_length = pipeline.renderer.template, pipeline.context_length
        return JsonResponse(parsed.build_reply(template, context_length))

    async def _detokenize(self, request: GatewayRequest) -> Response:
        self._identify(request)
        parsed = parse_body(DetokenizeRequest, await request.read_body())
        pipeline = self._pipelines.get(parsed.model or "", self._pipeline)
        return JsonResponse(parsed.build_reply(pipeline.renderer.template))

    async def _report_health(self, request: GatewayRequest) -> Response:
        """Report that the gateway runs; a new instance id means that it was restarted."""
        return JsonResponse({"status": "ok", "instance": self._instance})

    # ------------------------------------------------------------- callers

    def _find_pipeline(self, model: str) -> CallPipeline:
        if (found := self._pipelines.get(model)) is None:
            models = ", ".join(map(repr, self._pipelines))
            judge = "; choose a judge with gateway.judge or gateway.endpoints"
            advice = judge if model == JUDGE_MODEL else ""
            raise NotFound(f"unknown model {model!r}: this endpoint serves {models}{advice}")
        return found

    def _find_attempt(self, request: GatewayRequest, scope: str = "") -> AttemptId | None:
        return identify_caller(request, self._secret, self._config.trace_header, scope).attempt

    def _identify(self, request: GatewayRequest) -> Caller:
        caller = identify_caller(request, self._secret, self._config.trace_header)
        if caller.attempt is None and not self._config.allow_unattributed:
            raise Unauthorized(
                "the call names no attempt: use the attempt's own URL or key, or send "
                f"the header {self._config.trace_header!r}"
            )
        return caller


def _build_source(
    request: GatewayRequest,
    body: bytes,
    caller: Caller,
    attempt: Attempt | None,
    dialect: str,
    model: str,
) -> RequestSource:
    rollout: str | None = request.state.rollout
    if attempt is not None and rollout not in (None, attempt.rollout.id):
        raise NotFound(f"attempt {attempt.id!r} does not belong to rollout {rollout!r}")
    return RequestSource(
        attempt=attempt,
        dialect=dialect,
        model=model,
        agent=caller.agent,
        digest=hashlib.blake2b(dialect.encode() + body, digest_size=16).hexdigest(),
        is_retry=request.headers.get(RETRY_HEADER, "0") != "0",
        size=len(body),
    )


def _describe_model(name: str) -> Json:
    """Describe a model for clients of OpenAI and Anthropic, which request the same path."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "whet",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }
