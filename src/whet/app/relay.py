"""Passes agents' requests on to an OpenAI-compatible endpoint: text only, and never trained.

The agent keeps its own URL and key, as with a model of ours: so a rollout's temperature is forced,
an attempt that has ended is refused, and the endpoint's key never reaches an agent.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, cast

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from whet.errors import ConfigError, EngineError, RequestError, WhetError
from whet.gateway import keys
from whet.gateway.attribution import Unauthorized
from whet.gateway.delivery import tell
from whet.gateway.dialects.parts import openai_error
from whet.protocols import AttemptLog
from whet.types import AttemptId

logger = logging.getLogger(__name__)

PATHS = ("/rollout/{rollout}/attempt/{attempt}/v1/v1", "/rollout/{rollout}/attempt/{attempt}/v1")
TIMEOUT = httpx.Timeout(600.0, connect=30.0)
PROBE_S = 20.0


class Relay:
    """One model of an endpoint, for the attempts of one log."""

    def __init__(
        self,
        url: str,
        model: str,
        key: str,
        *,
        log: AttemptLog,
        secret: bytes,
        forces_sampling: bool = True,
    ) -> None:
        """With `forces_sampling` a rollout's own sampling is that of this model too."""
        self._forces_sampling = forces_sampling
        self._url = url.rstrip("/")
        self._model = model
        self._headers = _headers(key)
        self._log = log
        self._secret = secret
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        routes = [Route(p + "/{path:path}", self._pass_on, methods=["GET", "POST"]) for p in PATHS]
        self.app = Starlette(routes=routes)

    def close(self) -> None:
        """Let go of the endpoint, from another thread than the server's, while that still runs."""
        if self._client is not None and self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result(10)

    async def _pass_on(self, request: Request) -> Response:
        try:
            body = await self._body(request)
            path = f"{self._url}/{request.path_params['path']}"
            with_query = f"{path}?{request.url.query}" if request.url.query else path
            sent = self._open().build_request(
                request.method, with_query, headers=self._headers, content=body
            )
            return await self._answer(sent)
        except WhetError as error:
            told = tell(error)
            return JSONResponse(openai_error(told), told.status)

    async def _body(self, request: Request) -> bytes:
        """The request as the endpoint is to see it. Raises as `AttemptLog.attempt` does."""
        named = AttemptId(request.path_params["attempt"])
        _, _, bearer = request.headers.get("authorization", "").partition(" ")
        sent = (bearer.strip(), request.headers.get("x-api-key", ""))
        if named not in [keys.read(key, self._secret) for key in sent]:
            raise Unauthorized("send the attempt's API key: llm.api_key")
        attempt = await self._log.attempt(named)
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

    async def _answer(self, sent: httpx.Request) -> Response:
        try:
            reply = await self._open().send(sent, stream=True)
        except httpx.HTTPError as error:
            raise EngineError(f"the endpoint does not answer: {_reason(error)}") from error

        async def pieces() -> AsyncGenerator[bytes]:
            async with aclosing(reply):
                async for piece in reply.aiter_bytes():
                    yield piece

        kept = ("content-type", "retry-after", "x-request-id")
        headers = {name: reply.headers[name] for name in kept if name in reply.headers}
        return StreamingResponse(pieces(), status_code=reply.status_code, headers=headers)

    def _open(self) -> httpx.AsyncClient:
        """The client, made where it is used: in the loop of the server's thread."""
        if self._client is None:
            self._loop = asyncio.get_running_loop()
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
            self._client = httpx.AsyncClient(timeout=TIMEOUT, limits=limits)
        return self._client


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
