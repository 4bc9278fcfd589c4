"""Endpoints that are compatible with OpenAI's and Anthropic's API.

A model is the name of a base model, the path of a checkpoint, or `BASE;PATH`. Calls go through
a gateway's pipeline, so chat templates, tool calls, streams and errors are those of `whet serve`.
"""

import json
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import lru_cache, partial
from typing import Any, cast

from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope

from whet.app.tinker_server.state import ServerState
from whet.app.tinker_server.storage import SCHEME
from whet.config import GatewayConfig
from whet.errors import RequestError
from whet.gateway.app import build_app
from whet.gateway.auth import ANY_ATTEMPT, mint_key
from whet.gateway.dialects.anthropic import ANTHROPIC
from whet.gateway.dialects.chat import CHAT
from whet.gateway.dialects.dialect import ErrorFormat
from whet.gateway.http import GatewayRequest, Handler, HttpEndpoint, JsonResponse
from whet.gateway.pipeline import CallPipeline, Log
from whet.protocols import Engine
from whet.types import Sampling, TokenChunk

OPENAI_PREFIX = "/oai/api/v1"
ANTHROPIC_PREFIX = "/anthropic/api/v1"
"""The prefixes of the hosted service, after the address that Tinker's client gets."""
KEPT_MODELS = 64
"""Models whose pipelines are kept for their next calls."""
CONFIG = GatewayConfig(allow_unattributed=True)
OWN_HEADERS = {
    *(b"authorization", b"x-api-key", b"baggage", b"content-length"),
    CONFIG.trace_header.encode(),
}
"""Headers that the gateway does not get from clients: here no call is that of an attempt."""


def build_inference_mounts(state: ServerState, log: Log) -> list[Mount]:
    """Build the routes. The `log` of the gateway stays empty: nothing is recorded."""
    inference = _Inference(state, log)
    return [
        inference.mount(OPENAI_PREFIX, CHAT.errors, "/chat/completions", "/completions"),
        inference.mount(ANTHROPIC_PREFIX, ANTHROPIC.errors, "/messages", "/messages/count_tokens"),
    ]


class _Inference:
    def __init__(self, state: ServerState, log: Log) -> None:
        self._state = state
        self._log = log
        self._secret = secrets.token_bytes(32)
        self._key = mint_key(ANY_ATTEMPT, self._secret)
        self._gateway = lru_cache(KEPT_MODELS)(self._build_gateway)

    def mount(self, prefix: str, errors: ErrorFormat, *calls: str) -> Mount:
        handlers: dict[str, Handler] = {path: partial(self._call, path) for path in calls}
        routes = [
            Route(path, HttpEndpoint(errors, POST=handler), methods=["POST"])
            for path, handler in handlers.items()
        ]
        models = HttpEndpoint(errors, GET=self._list_models)
        return Mount(prefix, routes=[*routes, Route("/models", models, methods=["GET"])])

    async def _call(self, path: str, request: GatewayRequest) -> None:
        """Pass a call on to the gateway of its model."""
        body = await request.read_body()
        app = self._gateway(_read_model(body))
        scope = self._rewrite(request.scope, path, len(body))
        await app(scope, _replay(body, request.receive), request.send)

    async def _list_models(self, request: GatewayRequest) -> JsonResponse:
        """List base models and the named checkpoints that can be sampled from, newest first."""
        bases = [name for model in self._state.models for name in model.samplers.served.listed]
        saved = [
            one for one in self._state.storage.list_checkpoints() if one.kind == "sampler_weights"
        ]
        found = [(name, 0) for name in bases] + [(one.path, int(one.created)) for one in saved]
        return JsonResponse(
            {
                "object": "list",
                "data": [
                    {"id": name, "object": "model", "created": created, "owned_by": "whet"}
                    for name, created in found
                ],
            }
        )

    def _build_gateway(self, name: str) -> ASGIApp:
        base, path = _split_model(name)
        samplers = self._state.find_sampled_model(base, path).samplers
        pipeline = CallPipeline(
            engine=_CheckpointEngine(self._state, base, path),
            log=self._log,
            renderer=samplers.renderer,
            models=(name,),
            context_length=samplers.served.context_length,
        )
        return build_app(pipeline, self._secret, CONFIG)

    def _rewrite(self, scope: Scope, path: str, length: int) -> Scope:
        """Address the endpoint of the gateway, with the gateway's own key."""
        sent: list[tuple[bytes, bytes]] = list(scope["headers"])
        headers = [(name, value) for name, value in sent if name.lower() not in OWN_HEADERS]
        headers.append((b"authorization", f"Bearer {self._key}".encode()))
        headers.append((b"content-length", str(length).encode()))
        return {**scope, "path": path, "root_path": "", "headers": headers}


class _CheckpointEngine(Engine):
    """Samples from a checkpoint as it is at the time of the call, or from a base model."""

    def __init__(self, state: ServerState, base: str | None, path: str | None) -> None:
        self._state = state
        self._base, self._path = base, path

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        stream: bool = False,
        affinity: str = "",
    ) -> AsyncGenerator[TokenChunk]:
        samplers = self._state.find_sampled_model(self._base, self._path).samplers
        weights = self._state.find_weights(self._path)
        generated = samplers.generate(weights, prompt, sampling, stream=stream)
        async with aclosing(generated) as chunks:
            async for chunk in chunks:
                yield chunk

    async def close(self) -> None:
        """The samplers are closed with the server."""


def _read_model(body: bytes) -> str:
    """Read the model of a request. Raises RequestError if it names none."""
    try:
        found: Any = json.loads(body)  # Any: the gateway validates the rest
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    model = cast(dict[str, object], found).get("model") if isinstance(found, dict) else None
    if not isinstance(model, str):
        raise RequestError("missing model: expected a model of /models or a checkpoint's path")
    return model


def _split_model(name: str) -> tuple[str | None, str | None]:
    """Split a name into base model and checkpoint path. Raises RequestError."""
    base, has_base, path = name.rpartition(";")
    if not has_base:
        return (None, name) if name.startswith(SCHEME) else (name, None)
    if not path.startswith(SCHEME):
        raise RequestError(
            f"invalid model {name!r:.200}: expected a base model, a checkpoint's path "
            f"{SCHEME}RUN/sampler_weights/NAME, or BASE;PATH"
        )
    return base, path


def _replay(body: bytes, receive: Receive) -> Receive:
    """Build a `receive` that delivers a body that was read before, then what follows it."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return unread.pop() if unread else await receive()

    return replay
