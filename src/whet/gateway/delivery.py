"""How a reply leaves: whole or as it is sampled, recorded first, and only to who still listens."""

import logging

from starlette.types import Send

from whet.errors import (
    EngineBusy,
    EngineError,
    LeaseLost,
    NotFound,
    PromptTooLong,
    RequestError,
    WhetError,
)
from whet.gateway import asgi, strictjson
from whet.gateway.asgi import ClientLeft, Request, TooLarge, TooSlow, send_whole
from whet.gateway.attribution import Unauthorized
from whet.gateway.calls import Prompt
from whet.gateway.dialects.dialect import Dialect, Json, Reply, ThreadUnsupported, Told
from whet.gateway.dialects.parts import openai_error
from whet.gateway.events import EventStream
from whet.gateway.service import Service

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1

STATUS: list[tuple[type[WhetError], int, str]] = [
    (Unauthorized, 401, "invalid_api_key"),
    (PromptTooLong, 400, "context_length_exceeded"),
    (ThreadUnsupported, 400, "thread_unsupported_request"),
    (TooLarge, 413, "request_too_large"),
    (TooSlow, 408, "request_timeout"),
    (RequestError, 400, "invalid_request"),
    (NotFound, 404, "not_found"),
    (LeaseLost, 409, "attempt_ended"),
    (EngineBusy, 429, "engine_busy"),
    (EngineError, 503, "engine_error"),
]
"""How our errors are told: the first that fits."""


def tell(error: WhetError) -> Told:
    """An error as a status, a code and a sentence."""
    for kind, status, code in STATUS:
        if isinstance(error, kind):
            return Told(status, code, str(error))
    logger.error("call failed error=%s", error)
    return Told(500, "internal_error", str(error))


class JsonReply(asgi.Reply):
    """A JSON value."""

    def __init__(self, value: Json, status: int = 200) -> None:
        self._value = value
        self._status = status

    async def deliver(self, request: Request, send: Send) -> None:
        headers = [(b"content-type", b"application/json")]
        # These are worth another try at once; 409 must not be tried again, which SDKs else would.
        if self._status in (429, 503):
            headers.append((b"retry-after", b"%d" % RETRY_AFTER_S))
        if self._status == 409:
            headers.append((b"x-should-retry", b"false"))
        await send_whole(send, self._status, headers, strictjson.dumps(self._value))


def refusal(error: WhetError) -> JsonReply:
    """An error as OpenAI tells it, where no wire format is known."""
    told = tell(error)
    return JsonReply(openai_error(told), told.status)


class Answer(asgi.Reply):
    """The reply to a prompt, sampled when it is delivered.

    Tokens of a stream go out as they are sampled; its last event, like a whole reply, waits until
    the call is recorded. A client that leaves stops the sampling.
    """

    def __init__(self, dialect: Dialect, service: Service, prompt: Prompt, reply: Reply) -> None:
        self._dialect = dialect
        self._service = service
        self._prompt = prompt
        self._reply = reply

    async def deliver(self, request: Request, send: Send) -> None:
        sent = False
        try:
            if self._prompt.ask.stream:
                sent = await self._stream(request, send)
            else:
                sent = await self._send(request, send)
        except ClientLeft:
            pass
        finally:
            if not sent:
                self._service.lost(self._prompt)

    async def _send(self, request: Request, send: Send) -> bool:
        try:
            done = await self._service.complete(self._prompt, watch=request.watched())
        except ClientLeft:
            raise
        except WhetError as error:
            await self._refuse(error, request, send)
            return True
        _check_there(request)
        await JsonReply(self._reply.whole(*done)).deliver(request, send)
        return True

    async def _stream(self, request: Request, send: Send) -> bool:
        events = EventStream(send, self._service.renderer, self._prompt, self._reply)
        watch = request.watched(events.late)
        try:
            done = await self._service.complete(self._prompt, events.piece, watch)
            _check_there(request)
            await events.finish(done)
        except ClientLeft:
            raise
        except WhetError as error:
            if not events.started:
                await self._refuse(error, request, send)
            else:
                await events.end(self._dialect.error_event(tell(error)))
        finally:
            watch.close()
            events.close()
        return True

    async def _refuse(self, error: WhetError, request: Request, send: Send) -> None:
        told = tell(error)
        await JsonReply(self._dialect.error(told), told.status).deliver(request, send)


def _check_there(request: Request) -> None:
    """Servers drop what is sent to a client that has gone without a word: better not to send."""
    if request.has_left():
        raise ClientLeft("the client left while its call was recorded")
