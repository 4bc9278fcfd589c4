"""Streamed replies: server-sent events that leave as tokens are sampled."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.types import Send

from whet.gateway.dialects.dialect import Reply
from whet.gateway.requests import CompletedCall, PreparedCall
from whet.gateway.templates.detokenize import StreamDecoder
from whet.gateway.templates.renderer import Renderer
from whet.types import TokenChunk

KEEP_ALIVE_S = 15.0
"""Longest silence: proxies and clients with a read timeout close idle connections."""

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients skip."""

HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


class EventStream:
    """A reply as server-sent events; `finish` sends the last one once the call is recorded."""

    def __init__(self, send: Send, renderer: Renderer, call: PreparedCall, reply: Reply) -> None:
        self._send = send
        self._reply = reply
        self._decoders = [_build_decoder(renderer, call) for _ in range(call.request.n)]
        """One for each choice."""
        self._unfinished = call.request.n
        """Number of choices that are still sampled."""
        self._unsent = reply.build_first_events()
        """Events that the next write sends first."""
        self._started = False
        self._last_write = asyncio.get_running_loop().time()
        self._writing = asyncio.Lock()

    @asynccontextmanager
    async def keep_alive(self) -> AsyncGenerator[None]:
        """Send comments while nothing else is sent; around the sampling and recording."""
        pinger = asyncio.create_task(self._ping())
        try:
            yield
        finally:
            async with self._writing:  # never cancel it in the middle of a write
                pinger.cancel()

    async def send_chunk(self, index: int, chunk: TokenChunk) -> None:
        """Send the next tokens of a choice. `finish` sends those that end the last choice."""
        events = self._reply.build_chunk_events(
            index, chunk, self._decoders[index].feed(chunk.tokens)
        )
        self._unfinished -= chunk.stop is not None
        if self._unfinished:
            await self._write(events)
        else:  # `finish` sends them: each write wakes the client
            self._unsent += events

    async def finish(self, completed: CompletedCall) -> None:
        """Send what is left of a call that is recorded, and end the stream."""
        pairs = zip(self._decoders, completed.messages, strict=True)
        rest = [decoder.finish(message) for decoder, message in pairs]
        await self._write(self._reply.build_last_events(completed, rest), more=False)

    async def _write(self, events: bytes, *, more: bool = True) -> None:
        async with self._writing:
            self._last_write = asyncio.get_running_loop().time()
            if not self._started:
                self._started = True
                start = {"type": "http.response.start", "status": 200, "headers": HEADERS}
                await self._send(start)
            body, self._unsent = self._unsent + events, b""
            if body or not more:
                await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _ping(self) -> None:
        """Send a comment whenever nothing else was sent for a while."""
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self._last_write + KEEP_ALIVE_S - now())
            if self._last_write + KEEP_ALIVE_S <= now():
                await self._write(KEEP_ALIVE)


def _build_decoder(renderer: Renderer, call: PreparedCall) -> StreamDecoder:
    return StreamDecoder(
        renderer,
        call.sampling,
        parse_calls=call.request.parse_calls,
        prompt=call.tokens,
        as_text=call.request.raw is not None,
    )
