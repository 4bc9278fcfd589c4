"""The events of a streamed reply, on their way to the client as tokens are sampled.

The first tokens leave at once. Those that are sampled within a few milliseconds of an event leave
together in the next one: a fast engine does not pay for a write with every token, and with a slow
one nothing waits.
"""

import asyncio
from collections.abc import Awaitable
from itertools import groupby

from starlette.types import Send

from whet.gateway.dialects.dialect import Reply
from whet.gateway.messages import Message
from whet.gateway.pieces import join_pieces
from whet.gateway.render import Renderer
from whet.gateway.service import Prompt
from whet.gateway.text import TextStream
from whet.types import Call, Piece

WINDOW_S = 0.005
"""How long sampled tokens wait at most for others to leave with."""

KEEP_ALIVE_S = 15.0
"""After so long without a token a stream says that it is still there."""

HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


class EventStream:
    """A reply that grows."""

    def __init__(self, send: Send, renderer: Renderer, prompt: Prompt, reply: Reply) -> None:
        self.started = False
        self._send = send
        self._reply = reply
        self._texts = [
            TextStream(
                renderer,
                prompt.sampling,
                tools=prompt.ask.calls_tools,
                prompt=prompt.tokens,
                as_text=prompt.ask.raw is not None,
            )
            for _ in range(prompt.ask.n)
        ]
        self._waiting: list[tuple[int, Piece]] = []
        self._writing = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._last_write = self._loop.time()
        self._flush_timer: asyncio.Handle | None = None
        self._alive_timer = self._loop.call_later(KEEP_ALIVE_S, self._keep_alive)
        self._task: asyncio.Task[None] | None = None

    def piece(self, index: int, piece: Piece) -> Awaitable[None] | None:
        """Some tokens of a choice were sampled; gives the write to wait for, if one is due."""
        self._waiting.append((index, piece))
        if self._flush_timer is not None:
            return None
        due = self._last_write + WINDOW_S
        if self._task is None:
            # Once the engine has nothing more at hand: what it has leaves together.
            self._flush_timer = self._loop.call_soon(self._begin, b"")
        elif self._loop.time() >= due:
            return self._write()
        else:
            self._flush_timer = self._loop.call_at(due, self._begin, b"")
        return None

    async def finish(self, call: Call) -> None:
        """The call is recorded: say what is left of it."""
        if not self._reply.shows_tokens:
            self._waiting.clear()  # their text is in what is left
        left = self._events()
        messages = (Message.from_json(generation.message) for generation in call.generations)
        rest = [text.finish(m) for text, m in zip(self._texts, messages, strict=True)]
        await self.end(left + self._reply.last(call, rest))

    async def end(self, events: bytes) -> None:
        """Say the last events, behind all that is still to be said."""
        self.close()
        if self._task is not None:
            await self._task
        await self._write(events, more=False)

    def close(self) -> None:
        """Nothing will be said any more but by `end`. Idempotent."""
        self._alive_timer.cancel()
        if self._flush_timer is not None:
            self._flush_timer.cancel()

    async def _write(self, more_events: bytes = b"", *, more: bool = True) -> None:
        async with self._writing:
            data = b"" if self.started else self._reply.first()
            data += self._events() + more_events
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            self._last_write = self._loop.time()
            if data or not more:
                await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def _events(self) -> bytes:
        """Of the tokens that wait, which are none then."""
        waiting, self._waiting = self._waiting, []
        events = b""
        for index, pieces in groupby(waiting, key=lambda entry: entry[0]):
            piece = join_pieces([piece for _, piece in pieces])
            events += self._reply.piece(index, piece, self._texts[index].feed(piece.tokens))
        return events

    # ------------------------------------------------------------- timers

    def _begin(self, events: bytes) -> None:
        self._flush_timer = None
        self._task = self._loop.create_task(self._write(events))

    def _keep_alive(self) -> None:
        """Comments, which clients skip: a proxy or a client with a read timeout sees life."""
        due = self._last_write + KEEP_ALIVE_S
        if due <= self._loop.time():
            self._begin(b": keep-alive\n\n")
            due = self._loop.time() + KEEP_ALIVE_S
        self._alive_timer = self._loop.call_at(due, self._keep_alive)
