"""The events of a streamed reply, on their way to the client as tokens are sampled.

The first tokens leave at once. Those that are sampled within a few milliseconds of an event leave
together in the next one: a fast engine does not pay for a write with every token, and with a slow
one nothing waits. A reply that is whole at once, before any of it has left, waits a little for its
record: it may then leave in one go.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import cached_property

from starlette.types import Send

from whet.gateway.asgi import send_whole
from whet.gateway.calls import Completed, Prompt
from whet.gateway.dialects.dialect import Reply, Said
from whet.gateway.messages import Message
from whet.gateway.pieces import SampledSoFar
from whet.gateway.render import Renderer
from whet.gateway.text import TextStream

WINDOW_S = 0.005
"""How long sampled tokens wait at most for others to leave with."""

RECORD_S = 0.2
"""How long a reply that is whole waits for its record, once it takes a while."""

KEEP_ALIVE_S = 15.0
"""After so long without a token a stream says that it is still there."""

EVENTS = (b"content-type", b"text/event-stream")
NO_CACHE = (b"cache-control", b"no-cache")


@dataclass(slots=True)
class _Told:
    """What was said of a choice before the whole was known."""

    text: TextStream
    pieces: int = 0


class EventStream:
    """A reply that grows."""

    def __init__(self, send: Send, renderer: Renderer, prompt: Prompt, reply: Reply) -> None:
        self.started = False
        self._send = send
        self._renderer = renderer
        self._prompt = prompt
        self._reply = reply
        self._choices: dict[int, SampledSoFar] = {}
        """Those that have begun, by index."""
        self._told: dict[int, _Told] = {}
        """Those of which something has left, by index."""
        self._early = True
        self._closed = False
        """Whether nothing will be said any more but by `finish` or `end`."""
        self._task: asyncio.Task[None] | None = None
        """The last write that nobody waits for yet, once there was one."""
        self._last_write = 0.0
        self._flush_timer: asyncio.Handle | None = None
        self._alive_timer: asyncio.Handle | None = None
        """Of the wait for the record, and then of signs of life."""

    def piece(self, index: int, sampled: SampledSoFar) -> Awaitable[None] | None:
        """A choice has grown; gives the write to wait for, if one is due."""
        self._choices[index] = sampled
        if self._flush_timer is None and not self._may_leave_whole():
            loop = asyncio.get_running_loop()
            due = self._last_write + WINDOW_S
            if self._task is None:
                # Once the engine has nothing more at hand: what it has leaves together.
                self._flush_timer = loop.call_soon(self._flush)
            elif loop.time() >= due:
                return self._write()
            else:
                self._flush_timer = loop.call_at(due, self._flush)
        sampled.expected = True
        return None

    def late(self) -> None:
        """The reply takes a while: what is there leaves, and soon does not wait for its record."""
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        if self._may_leave_whole():
            self._alive_timer = loop.call_later(RECORD_S, self._say_what_is_there)
        else:
            self._say_what_is_there()

    async def finish(self, done: Completed) -> None:
        """The call is recorded: say what is left of it."""
        self._closed = True
        if self._task is not None:
            await self._task
        events = b"" if self.started else self._reply.first()
        if self._reply.shows_tokens:  # else they are in the text that is left
            events += self._events()
        rest: Sequence[Said] = done.messages
        if self._told:
            rest = [self._left(index, message) for index, message in enumerate(rest)]
        events += self._reply.last(done.call, done.messages, rest)
        if self.started:
            self._choices = {}  # all is said of them
            await self._write(events, more=False)
        else:
            self.started = True
            await send_whole(self._send, 200, [EVENTS], events)

    async def end(self, events: bytes) -> None:
        """Say the last events of a stream that has started."""
        self._closed = True
        if self._task is not None:
            await self._task
        await self._write(events, more=False)

    def close(self) -> None:
        """Nothing will be said any more. Idempotent."""
        self._closed = True
        if self._alive_timer is not None:
            self._alive_timer.cancel()
        if self._flush_timer is not None:
            self._flush_timer.cancel()

    async def _write(self, more_events: bytes = b"", *, more: bool = True) -> None:
        async with self._writing:
            self._last_write = asyncio.get_running_loop().time()
            data = b""
            if not self.started:
                self.started = True
                data = self._reply.first()
                headers = [EVENTS, NO_CACHE]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            data += self._events() + more_events
            if data or not more:
                await self._send({"type": "http.response.body", "body": data, "more_body": more})

    @cached_property
    def _writing(self) -> asyncio.Lock:
        return asyncio.Lock()

    def _events(self) -> bytes:
        """Of the tokens of which nothing was said yet."""
        events = b""
        for index, sampled in self._choices.items():
            sampled.expected = False
            told = self._told.get(index)
            if told is None:
                told = self._told[index] = _Told(self._new_text())
            if told.pieces < len(sampled.pieces):
                piece = sampled.since(told.pieces)
                told.pieces = len(sampled.pieces)
                if sampled.message is None:
                    delta = told.text.feed(piece.tokens)
                else:
                    delta = told.text.finish(sampled.message)
                events += self._reply.piece(index, piece, delta)
        return events

    def _left(self, index: int, message: Message) -> Said:
        """What is left to tell of a message."""
        told = self._told.get(index)
        return message if told is None else told.text.finish(message)

    def _new_text(self) -> TextStream:
        prompt = self._prompt
        return TextStream(
            self._renderer,
            prompt.sampling,
            tools=prompt.ask.calls_tools,
            prompt=prompt.tokens,
            as_text=prompt.ask.raw is not None,
        )

    # ------------------------------------------------------------- timers

    def _say_what_is_there(self) -> None:
        if self._closed:
            return
        self._early = False
        if self._choices and self._task is None:
            self._begin(b"")
        loop = asyncio.get_running_loop()
        self._alive_timer = loop.call_later(KEEP_ALIVE_S, self._keep_alive)

    def _may_leave_whole(self) -> bool:
        """Whether all was sampled and none has left, so that its record is worth waiting for."""
        whole = 0
        for sampled in self._choices.values():
            whole += sampled.pieces[-1].stop is not None
        return whole == self._prompt.ask.n and self._early and self._task is None

    def _flush(self) -> None:
        self._flush_timer = None
        if not self._closed and not self._may_leave_whole():
            self._begin(b"")

    def _begin(self, events: bytes) -> None:
        self._task = asyncio.get_running_loop().create_task(self._write(events))

    def _keep_alive(self) -> None:
        """Comments, which clients skip: a proxy or a client with a read timeout sees life."""
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        due = self._last_write + KEEP_ALIVE_S
        if due <= loop.time():
            self._begin(b": keep-alive\n\n")
            due = loop.time() + KEEP_ALIVE_S
        self._alive_timer = loop.call_at(due, self._keep_alive)
