"""How a reply leaves: whole or as it is sampled, recorded first, and only to who still listens."""

import logging
import time

import anyio
from anyio import CancelScope, create_task_group
from anyio.lowlevel import checkpoint
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from whet.errors import EngineError, LeaseLost, NotFound, PromptTooLong, RequestError, WhetError
from whet.gateway import strictjson
from whet.gateway.attribution import Unauthorized
from whet.gateway.dialects.dialect import Dialect, Json, Reply, ThreadUnsupported, Told
from whet.gateway.messages import Message
from whet.gateway.service import Prompt, Service
from whet.gateway.text import TextStream
from whet.types import Call, Piece

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
"""After so long without a token a stream says that it is still there."""

RETRY_AFTER_S = 1


class TooLarge(RequestError):
    """The body is larger than we read."""


class TooSlow(RequestError):
    """The body did not arrive in time."""


STATUS: list[tuple[type[WhetError], int, str]] = [
    (Unauthorized, 401, "invalid_api_key"),
    (PromptTooLong, 400, "context_length_exceeded"),
    (ThreadUnsupported, 400, "thread_unsupported_request"),
    (TooLarge, 413, "request_too_large"),
    (TooSlow, 408, "request_timeout"),
    (RequestError, 400, "invalid_request"),
    (NotFound, 404, "not_found"),
    (LeaseLost, 409, "attempt_ended"),
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


class JsonReply(Response):
    """A JSON value."""

    def __init__(self, value: Json, status: int = 200) -> None:
        # 503 is worth another try at once; 409 must not be tried again, which SDKs else would.
        headers = {"retry-after": str(RETRY_AFTER_S)} if status == 503 else {}
        if status == 409:
            headers["x-should-retry"] = "false"
        super().__init__(
            strictjson.dumps(value), status, headers=headers, media_type="application/json"
        )


class Answer(Response):
    """The reply to a prompt, sampled when it is sent.

    Tokens of a stream go out as they are sampled; its last event, like a whole reply, waits until
    the call is recorded. A client that leaves stops the sampling.
    """

    def __init__(self, dialect: Dialect, service: Service, prompt: Prompt, reply: Reply) -> None:
        self._dialect = dialect
        self._service = service
        self._prompt = prompt
        self._reply = reply
        self._started = False
        self._last_write = 0.0
        self._texts = [
            TextStream(
                service.renderer,
                prompt.sampling,
                tools=prompt.ask.calls_tools,
                prompt=prompt.tokens,
                as_text=prompt.ask.raw is not None,
            )
            for _ in range(prompt.ask.n if prompt.ask.stream else 0)
        ]
        self._tops: list[list[tuple[tuple[int, float], ...]]] = [[] for _ in range(prompt.ask.n)]
        super().__init__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = False
        try:
            async with create_task_group() as tasks:
                tasks.start_soon(_watch, receive, tasks.cancel_scope)
                if self._prompt.ask.stream:
                    tasks.start_soon(self._keep_alive, send)
                await self._answer(scope, receive, send)
                sent = True
                tasks.cancel_scope.cancel()
        finally:
            if not sent:
                self._service.lost(self._prompt)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def on_piece(index: int, piece: Piece) -> None:
            if self._prompt.ask.stream:
                await self._start(send)
                delta = self._texts[index].feed(piece.tokens)
                await self._write(send, self._reply.piece(index, piece, delta))
            else:
                self._tops[index] += piece.top

        try:
            call = await self._service.complete(self._prompt, on_piece)
        except WhetError as error:
            told = tell(error)
            if self._started:
                await self._write(send, self._dialect.error_event(told), more=False)
            else:
                await JsonReply(self._dialect.error(told), told.status)(scope, receive, send)
            return
        # Servers drop what is sent to a client that has gone without a word: let the watcher see.
        await checkpoint()
        if self._prompt.ask.stream:
            await self._write(send, self._last(call), more=False)
        else:
            await JsonReply(self._reply.whole(call, self._tops))(scope, receive, send)

    def _last(self, call: Call) -> bytes:
        messages = (Message.from_json(g.message) for g in call.generations)
        rest = [text.finish(m) for text, m in zip(self._texts, messages, strict=True)]
        return self._reply.last(call, rest)

    async def _start(self, send: Send) -> None:
        if self._started:
            return
        self._started = True
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._write(send, self._reply.first())

    async def _write(self, send: Send, data: bytes, *, more: bool = True) -> None:
        self._last_write = time.monotonic()
        if data or not more:
            await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _keep_alive(self, send: Send) -> None:
        """Comments, which clients skip: a proxy or a client with a read timeout sees life."""
        self._last_write = time.monotonic()
        while True:
            await anyio.sleep(self._last_write + KEEP_ALIVE_S - time.monotonic())
            if self._last_write + KEEP_ALIVE_S <= time.monotonic():
                await self._start(send)
                await self._write(send, b": keep-alive\n\n")


async def _watch(receive: Receive, scope: CancelScope) -> None:
    """Stop everything, and with it the sampling, once the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
