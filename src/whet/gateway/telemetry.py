"""Endpoints for agents in other processes, with the key of their attempt: rewards and traces."""

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from whet.errors import RequestError, WhetError
from whet.gateway.auth import REWARDS, require_attempt
from whet.gateway.dialects.wire import parse_body
from whet.gateway.http import (
    MAX_BODY_BYTES,
    BodyTooLarge,
    GatewayRequest,
    JsonResponse,
    UnsupportedMediaType,
    classify_error,
)
from whet.gateway.pipeline import Log
from whet.io.otlp import (
    Encoding,
    Sender,
    build_error,
    build_response,
    ingest,
    parse_encoding,
    parse_export,
)
from whet.types import AttemptId, Reward

GZIP_WBITS = 31
"""zlib's window bits for the gzip format."""


def accept_reward(reward: Reward) -> None:
    """Accept every reward, where the algorithm that reads them is not known."""


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Handlers of rewards and traces."""

    log: Log
    find_attempt: Callable[[GatewayRequest, str], AttemptId | None]
    """Returns the attempt of a request with a key of a scope; None for the run's key. Raises
    Unauthorized."""
    check_reward: Callable[[Reward], None] = accept_reward
    """Raises RequestError for a reward that nothing reads."""

    async def post_reward(self, request: GatewayRequest) -> Response:
        """Record a reward, once for an idempotency key and body."""
        attempt = require_attempt(self.find_attempt(request, REWARDS))
        body = await request.read_body()
        reward = parse_body(Reward, body)
        self.check_reward(reward)
        key = request.headers.get("idempotency-key", "")
        digest = hashlib.blake2b(key.encode() + b"\0" + body, digest_size=16).hexdigest()
        await self.log.emit(attempt, reward, idempotency_key=digest if key else None)
        return JsonResponse({"recorded": True})

    async def list_rewards(self, request: GatewayRequest) -> Response:
        """List the rewards of the attempt so far."""
        rewards = await self.log.rewards(require_attempt(self.find_attempt(request, REWARDS)))
        return JsonResponse({"rewards": [reward.model_dump(mode="json") for reward in rewards]})

    async def ingest_traces(self, request: GatewayRequest) -> Response:
        """Record the spans of an OTLP exporter whose endpoint is the attempt's base URL."""
        encoding, status = Encoding.JSON, 200
        try:
            encoding = _read_encoding(request)
            attempt = self.find_attempt(request, "")
            sender = Sender(attempt, is_bound=attempt is not None)
            export = parse_export(_decompress(request, await request.read_body()), encoding)
            result = await ingest(export, sender, self.log.record)
            body = build_response(encoding, result.rejected, result.reason)
        except WhetError as error:  # reported in the encoding of the request
            status, _, message = classify_error(error)
            body = build_error(encoding, message)
        return Response(body, status, media_type=encoding)


def _read_encoding(request: Request) -> Encoding:
    try:
        return parse_encoding(request.headers.get("content-type", ""))
    except RequestError as error:
        raise UnsupportedMediaType(str(error)) from error


def _decompress(request: Request, body: bytes) -> bytes:
    if request.headers.get("content-encoding", "identity").lower() != "gzip":
        return body
    decompressor = zlib.decompressobj(GZIP_WBITS)
    try:
        plain = decompressor.decompress(body, MAX_BODY_BYTES)
    except zlib.error as error:
        raise RequestError(f"the body is not valid gzip: {error}") from error
    if not decompressor.eof:
        limit = f"{MAX_BODY_BYTES // 2**20} MiB"
        raise BodyTooLarge(f"the decompressed body is incomplete, or larger than {limit}")
    return plain
