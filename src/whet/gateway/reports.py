"""What agents in other processes tell of their attempt, with the key they call their model with:
rewards, and traces of OpenTelemetry."""

import zlib
from collections.abc import Callable

from starlette.types import Send

from whet.errors import RequestError, WhetError
from whet.gateway import asgi
from whet.gateway.asgi import BODY_LIMIT, Handler, Request, Route, TooLarge, send_whole
from whet.gateway.attribution import require_attempt
from whet.gateway.delivery import JsonReply, tell
from whet.gateway.dialects.dialect import validate
from whet.gateway.service import Log
from whet.otlp.export import Encoding, answer, encoding_of, read_export, refusal
from whet.otlp.taking import Sender, take
from whet.types import AttemptId, Reward

GZIP = 31
"""What zlib calls gzip's format."""


Callers = Callable[[Request], AttemptId | None]
"""Whose request it is; None for one of the run itself. Raises Unauthorized for anybody else's."""


def report_routes(log: Log, caller_of: Callers) -> list[Route]:
    """Where agents tell."""
    return [
        Route("POST", "/rewards", _post_reward(log, caller_of)),
        Route("GET", "/rewards", _list_rewards(log, caller_of)),
        Route("POST", "/traces", _take_traces(log, caller_of)),
    ]


def _post_reward(log: Log, caller_of: Callers) -> Handler:
    """A reward, as `whet.emit_reward` gives it."""

    async def post(request: Request) -> asgi.Reply:
        attempt = require_attempt(caller_of(request))
        reward = validate(Reward, await request.body())
        await log.emit(attempt, reward)
        return JsonReply({"recorded": True})

    return post


def _list_rewards(log: Log, caller_of: Callers) -> Handler:
    """What was posted so far."""

    async def show(request: Request) -> asgi.Reply:
        rewards = await log.rewards(require_attempt(caller_of(request)))
        return JsonReply({"rewards": [reward.model_dump(mode="json") for reward in rewards]})

    return show


def _take_traces(log: Log, caller_of: Callers) -> Handler:
    """Traces as an exporter sends them whose endpoint is the base URL of the attempt."""

    async def traces(request: Request) -> asgi.Reply:
        try:
            encoding = encoding_of(request.header("content-type"))
        except RequestError as error:
            return _OtlpReply(Encoding.JSON, refusal(Encoding.JSON, str(error)), 415)
        try:
            attempt = caller_of(request)
            sender = Sender(attempt, is_bound=attempt is not None)
            export = read_export(_unpacked(request, await request.body()), encoding)
            taken = await take(export, sender, log.record)
        except WhetError as error:
            return _OtlpReply(encoding, refusal(encoding, str(error)), tell(error).status)
        return _OtlpReply(encoding, answer(encoding, taken.rejected, taken.why))

    return traces


def _unpacked(request: Request, body: bytes) -> bytes:
    if request.header("content-encoding", "identity").lower() != "gzip":
        return body
    unpacker = zlib.decompressobj(GZIP)
    try:
        plain = unpacker.decompress(body, BODY_LIMIT)
    except zlib.error as error:
        raise RequestError(f"the body is not what gzip makes: {error}") from error
    if not unpacker.eof:
        raise TooLarge(f"the body is cut off, or larger than {BODY_LIMIT // 2**20} MiB")
    return plain


class _OtlpReply(asgi.Reply):
    def __init__(self, encoding: Encoding, body: bytes, status: int = 200) -> None:
        self._encoding = encoding
        self._body = body
        self._status = status

    async def deliver(self, request: Request, send: Send) -> None:
        headers = [(b"content-type", self._encoding.encode())]
        await send_whole(send, self._status, headers, self._body)
