"""Passes agents' requests on to an OpenAI-compatible endpoint: text only, and never trained.

The agent keeps its own URL and key, as with a model of ours: so a rollout's temperature is forced,
an attempt that has ended is refused, and the endpoint's key never reaches an agent.
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, cast

import httpx
from starlette.types import Send

from whet.config import GatewayConfig
from whet.errors import ConfigError, EngineError, RequestError, WhetError, boundary
from whet.gateway import asgi
from whet.gateway.app import serve_routes
from whet.gateway.asgi import ClientLeft, Request, Route
from whet.gateway.attribution import read_caller, require_attempt
from whet.gateway.delivery import refusal
from whet.gateway.reports import report_routes
from whet.gateway.service import Log
from whet.types import AttemptId

logger = logging.getLogger(__name__)

KEPT = ("content-type", "retry-after", "x-request-id")
"""Headers of an endpoint's reply that its client sees."""
TIMEOUT = httpx.Timeout(600.0, connect=30.0)
PROBE_S = 20.0


class Relay:
    """One model of an endpoint, for the attempts of one log; it is told their rewards and spans."""

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
        """With `forces_sampling` a rollout's own sampling is that of this model too."""
        self._forces_sampling = forces_sampling
        self._url = url.rstrip("/")
        self._model = model
        self._headers = _headers(key)
        self._log = log
        self._secret = secret
        self._trace_header = config.trace_header
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        rest = [Route(method, "/{path:path}", self._pass_on) for method in ("GET", "POST")]
        self.app = serve_routes([*report_routes(log, self._caller), *rest])

    def close(self) -> None:
        """Let go of the endpoint, from another thread than the server's, while that still runs."""
        if self._client is not None and self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result(10)

    def _caller(self, request: Request) -> AttemptId:
        return require_attempt(read_caller(request, self._secret, self._trace_header).attempt)

    async def _pass_on(self, request: Request) -> asgi.Reply:
        body = await self._body(request)
        with boundary(RequestError, "the path cannot be passed on"):
            url = httpx.URL(f"{self._url}/{request.params['path']}")
        if request.query_string:
            url = url.copy_with(query=request.query_string.encode("latin-1"))
        client = self._open()
        sent = client.build_request(request.method, url, headers=self._headers, content=body)
        return _PassedOn(client, sent)

    async def _body(self, request: Request) -> bytes:
        """The request as the endpoint is to see it. Raises as `AttemptLog.attempt` does."""
        attempt = await self._log.attempt(self._caller(request))
        if request.method == "GET":
            return b""
        try:
            asked = json.loads(await request.body())
        except ValueError as error:
            raise RequestError(f"the body is not JSON: {error}") from error
        if not isinstance(asked, dict):
            raise RequestError("the body is no JSON object")
        forced: dict[str, Any] = {}
        if self._forces_sampling:
            forced = attempt.rollout.sampling.model_dump(exclude_none=True)
        return json.dumps({**cast(dict[str, Any], asked), "model": self._model, **forced}).encode()

    def _open(self) -> httpx.AsyncClient:
        """The client, made where it is used: in the loop of the server's thread."""
        if self._client is None:
            self._loop = asyncio.get_running_loop()
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
            self._client = httpx.AsyncClient(timeout=TIMEOUT, limits=limits)
        return self._client


class _PassedOn(asgi.Reply):
    """What the endpoint answers, as it comes. A client that leaves ends it there too."""

    def __init__(self, client: httpx.AsyncClient, sent: httpx.Request) -> None:
        self._client = client
        self._sent = sent

    async def deliver(self, request: Request, send: Send) -> None:
        try:
            with request.watched():
                try:
                    reply = await self._client.send(self._sent, stream=True)
                except httpx.HTTPError as error:
                    raise EngineError(f"the endpoint does not answer: {_reason(error)}") from error
                await _copy(reply, send)
        except ClientLeft:
            pass
        except WhetError as error:
            await refusal(error).deliver(request, send)


async def _copy(reply: httpx.Response, send: Send) -> None:
    kept = [(name, reply.headers[name]) for name in KEPT if name in reply.headers]
    headers = [(name.encode(), value.encode()) for name, value in kept]
    async with aclosing(reply):
        await send({"type": "http.response.start", "status": reply.status_code, "headers": headers})
        try:
            async for piece in reply.aiter_bytes():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except httpx.HTTPError as error:  # its client sees it too: the reply has no end
            logger.warning("an endpoint broke off in its reply: %s", _reason(error))
            return
        await send({"type": "http.response.body", "body": b""})


def check_endpoint(url: str, key: str, key_name: str) -> None:
    """Ask an endpoint for its models: one that is not there or refuses the key is told at once.

    Raises:
        ConfigError: it does not answer, or not to this key.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"an endpoint is a URL such as https://host/v1; found {url!r}")
    try:
        reply = httpx.get(f"{url.rstrip('/')}/models", headers=_headers(key), timeout=PROBE_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"the endpoint {url!r} does not answer: {_reason(error)}") from error
    if reply.status_code in (401, 403):
        found = f"the key in {key_name}" if key else f"a request without a key; set {key_name}"
        raise ConfigError(f"the endpoint {url!r} refuses {found} (status {reply.status_code})")


def _headers(key: str) -> Mapping[str, str]:
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    return headers | ({"authorization": f"Bearer {key}"} if key else {})


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
