"""Proxy to OpenAI-compatible endpoints: text only, never trained.

The agent keeps its own URL and key, as with the policy: an attempt that has ended is refused, and
the endpoint's key never reaches an agent. Calls are passed on as text and not recorded.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, cast

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whet.config import GatewayConfig
from whet.errors import ConfigError, EngineError, RequestError
from whet.gateway.auth import Unauthorized, identify_caller, require_attempt
from whet.gateway.http import (
    GatewayRequest,
    HttpEndpoint,
    build_route,
    build_router,
    split_prefix,
)
from whet.gateway.pipeline import Log
from whet.gateway.telemetry import Telemetry
from whet.io.http_client import HttpClient, TransportError
from whet.types import AttemptId

logger = logging.getLogger(__name__)

SPEC = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*)=(.+)@(https?://.+)")
"""`NAME=MODEL@URL`"""
SAMPLED = ("/chat/completions", "/completions", "/responses", "/messages")
FORWARDED = (*SAMPLED, "/messages/count_tokens", "/embeddings")
"""Paths of an endpoint that agents may post to: its key can do more there than call models."""
KEPT_HEADERS = ("content-type", "retry-after", "x-request-id")
"""Headers of an endpoint's response that are passed on."""
CONNECT_TIMEOUT_S = 30.0
CHECK_TIMEOUT_S = 20.0


class UpstreamProxy:
    """Proxy to one model of an endpoint; rewards and spans of the attempts go to their log."""

    def __init__(
        self,
        url: str,
        model: str,
        key: str,
        *,
        log: Log,
        secret: bytes,
        config: GatewayConfig,
        forces_sampling: bool = True,
    ) -> None:
        """`forces_sampling` applies the sampling overrides of a rollout to this model too."""
        self._forces_sampling = forces_sampling
        self._url = url.rstrip("/")
        self._model = model
        self._log = log
        self._secret = secret
        self._trace_header = config.trace_header
        self._client = _build_client(key)
        proxies = [build_route(path, POST=self._proxy) for path in FORWARDED]
        models = build_route("/models", GET=self._proxy)
        telemetry = Telemetry(log, self._find_attempt)
        rewards = build_route("/rewards", POST=telemetry.post_reward, GET=telemetry.list_rewards)
        traces = build_route("/traces", POST=telemetry.ingest_traces)
        self.app = build_router([rewards, traces, models, *proxies])

    async def close(self) -> None:
        """Close the connections; the server's loop may be another one, and must still run."""
        await self._client.close()

    def _find_attempt(self, request: GatewayRequest, scope: str = "") -> AttemptId:
        caller = identify_caller(request, self._secret, self._trace_header, scope)
        return require_attempt(caller.attempt)

    async def _proxy(self, request: GatewayRequest) -> None:
        """Send the request to the endpoint, and its response to the client as it arrives."""
        body = await self._rewrite_body(request)
        query: bytes = request.scope["query_string"]
        url = f"{self._url}{request.scope['path']}" + (f"?{query.decode('ascii')}" if query else "")
        with request.watch_disconnect() as client, client.cancel_work():
            try:
                sent = self._client.stream(request.method, url, body=body)
                async with sent as response:
                    kept = [(name, response.headers.get(name)) for name in KEPT_HEADERS]
                    headers = [(n.encode(), value.encode()) for n, value in kept if value]
                    await request.send(
                        {
                            "type": "http.response.start",
                            "status": response.status,
                            "headers": headers,
                        }
                    )
                    async for chunk in response.content.iter_any():
                        await request.send(
                            {"type": "http.response.body", "body": chunk, "more_body": True}
                        )
            except TransportError as error:
                if not request.response_started:
                    raise EngineError(f"the endpoint does not answer: {error}") from error
                # The client notices as well: its response has no end.
                logger.warning("endpoint disconnected in the middle of a response: %s", error)
                return
            await request.send({"type": "http.response.body", "body": b""})

    async def _rewrite_body(self, request: GatewayRequest) -> bytes | None:
        """Set the endpoint's model and the rollout's sampling. Raises as `CallLog.attempt`."""
        attempt = await self._log.attempt(self._find_attempt(request))
        if request.method == "GET":
            return None
        try:
            value = json.loads(await request.read_body())
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise RequestError("the body is not a JSON object")
        forced: dict[str, Any] = {}
        if self._forces_sampling and request.scope["path"] in SAMPLED:
            forced = attempt.rollout.sampling.model_dump(exclude_none=True)
        fields = cast(dict[str, Any], value)
        return json.dumps({**fields, "model": self._model, **forced}).encode()


async def check_endpoint(url: str, key: str, key_name: str) -> None:
    """Request the models of an endpoint, to report an unreachable one or a wrong key early.

    Raises:
        ConfigError: it does not answer, or refuses the key.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"an endpoint is a URL such as https://host/v1; found {url!r}")
    try:
        async with _build_client(key) as client:
            models = f"{url.rstrip('/')}/models"
            response = await client.request("GET", models, timeout_s=CHECK_TIMEOUT_S)
    except TransportError as error:
        raise ConfigError(f"the endpoint {url!r} does not answer: {error}") from error
    if response.status in (401, 403):
        found = f"the key in {key_name}" if key else f"a request without a key; set {key_name}"
        raise ConfigError(f"the endpoint {url!r} refuses {found} (status {response.status})")


def _build_client(key: str) -> HttpClient:
    headers = {"Content-Type": "application/json"}
    return HttpClient(token=key, headers=headers, connect_s=CONNECT_TIMEOUT_S, trust_env=True)


# ------------------------------------------------------------------- several models by name


async def build_upstreams(
    config: GatewayConfig, log: Log, secret: bytes, report: Callable[[str], None]
) -> dict[str, UpstreamProxy]:
    """Build a proxy for each `NAME=MODEL@URL` of `gateway.endpoints`, and check each.

    Raises:
        ConfigError: one is invalid, does not answer, or refuses its key.
    """
    upstreams: dict[str, UpstreamProxy] = {}
    for spec in config.endpoints:
        found = SPEC.fullmatch(spec)
        if found is None:
            raise ConfigError(f"gateway.endpoints are of the form NAME=MODEL@URL; found {spec!r}")
        name, model, url = found.groups()
        variable = f"WHET_{re.sub(r'[^A-Z0-9]', '_', name.upper())}_KEY"
        key = os.environ.get(variable) or os.environ.get("OPENAI_API_KEY", "")
        await check_endpoint(url, key, f"{variable} or OPENAI_API_KEY")
        upstreams[name] = UpstreamProxy(
            url, model, key, log=log, secret=secret, config=config, forces_sampling=False
        )
        report(f"note: calls to {name!r} go to {url} as text; they are never trained")
    return upstreams


class UpstreamRouter:
    """ASGI middleware: routes calls of an upstream's model to its proxy, all others to the app."""

    def __init__(
        self,
        app: ASGIApp,
        upstreams: Mapping[str, UpstreamProxy],
        secret: bytes,
        config: GatewayConfig,
    ) -> None:
        self._app = app
        self._upstreams = upstreams
        self._secret = secret
        self._trace_header = config.trace_header
        self._endpoint = HttpEndpoint(POST=self._route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        if is_post and self._is_authorized_call(split_prefix(scope)):
            await self._endpoint(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def close(self) -> None:
        """Close the connections of every proxy, while the server still runs."""
        for upstream in self._upstreams.values():
            await upstream.close()

    def _is_authorized_call(self, scope: Scope) -> bool:
        """Whether this calls a model with a valid key; the app refuses calls with another."""
        if scope["path"] not in FORWARDED:
            return False
        try:
            identify_caller(Request(scope), self._secret, self._trace_header)
        except (Unauthorized, RequestError):
            return False
        return True

    async def _route(self, request: GatewayRequest) -> None:
        body = await request.read_body()
        upstream = self._upstreams.get(_read_model(body))
        replay: Iterator[Message] = iter([{"type": "http.request", "body": body}])

        async def receive() -> Message:
            return next(replay, None) or await request.receive()

        await (upstream.app if upstream else self._app)(request.scope, receive, request.send)


def _read_model(body: bytes) -> str:
    with suppress(ValueError, RecursionError):
        match json.loads(body):
            case {"model": str(model)}:
                return model
            case _:
                pass
    return ""
