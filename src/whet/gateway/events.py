"""The events of a streamed reply, on their way to the client as tokens are sampled.

The first tokens leave at once. Those that are sampled within a few milliseconds of an event leave
together in the next one: a fast engine does not pay for a write with every token, and with a slow
one nothing waits. A reply that is whole at once, before any of it has left, waits a little for its
record: it may then leave in one go.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass

from starlette.types import Send

from whet.gateway.asgi import send_whole
from whet.gateway.dialects.dialect import Reply
from whet.gateway.messages import Message
from whet.gateway.pieces import SampledSoFar
from whet.gateway.render import Renderer
from whet.gateway.service import Completed, Prompt
from whet.gateway.text import Delta, TextStream

WINDOW_S = 0.005
"""How long sampled tokens wait at most for others to leave with."""

KEEP_ALIVE_S = 15.0
"""After so long without a token a stream says that it is still there."""

EVENTS = (b"content-type", b"text/event-stream")
NO_CACHE = (b"cache-control", b"no-cache")


@dataclass(slots=True)
class _Choice:
    sampled: SampledSoFar
    text: TextStream | None = None
    """Once something has been told before the whole was known."""
    said: int = 0
    """Pieces of which the reply has told."""

    def rest(self, message: Message) -> Delta:
        """What is left to tell of the whole message."""
        if self.text is None:
            return Delta(message.content, message.reasoning)
        return self.text.finish(message)


class EventStream:
    """A reply that grows."""

    def __init__(self, send: Send, renderer: Renderer, prompt: Prompt, reply: Reply) -> None:
        self.started = False
        self._send = send
        self._renderer = renderer
        self._prompt = prompt
        self._reply = reply
        self._opened = False
        self._choices: dict[int, _Choice] = {}
        """Those that have begun, by index."""
        self._writing = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._last_write = 0.0
        self._flush_timer: asyncio.Handle | None = None
        self._task: asyncio.Task[None] | None = None
        self._early = True
        self._closed = False
        self._alive_timer: asyncio.Handle | None = None

    def piece(self, index: int, sampled: SampledSoFar) -> Awaitable[None] | None:
        """A choice has grown; gives the write to wait for, if one is due."""
        if index not in self._choices:
            self._choices[index] = _Choice(sampled)
        if self._flush_timer is None and not self._may_leave_whole():
            due = self._last_write + WINDOW_S
            if self._task is None:
                # Once the engine has nothing more at hand: what it has leaves together.
                self._flush_timer = self._loop.call_soon(self._flush)
            elif self._loop.time() >= due:
                return self._write()
            else:
                self._flush_timer = self._loop.call_at(due, self._flush)
        sampled.expected = True
        return None

    def late(self) -> None:
        """The reply takes a while: nothing that is there waits any longer for its record."""
        self._early = False
        if self._closed:
            return
        if self._choices and self._task is None:
            self._begin(b"")
        self._alive_timer = self._loop.call_later(KEEP_ALIVE_S, self._keep_alive)

    async def finish(self, done: Completed) -> None:
        """The call is recorded: say what is left of it."""
        # Where events say no more of tokens than their text, that is in what is left.
        left = self._first() + (self._events() if self._reply.shows_tokens else b"")
        choices, self._choices = self._choices, {}
        rest = [choices[index].rest(message) for index, message in enumerate(done.messages)]
        events = left + self._reply.last(done.call, done.messages, rest)
        if self._task is not None:
            await self.end(events)
        else:  # nothing has left
            self.close()
            self.started = True
            await send_whole(self._send, 200, [EVENTS], events)

    async def end(self, events: bytes) -> None:
        """Say the last events of a stream that has started."""
        self.close()
        if self._task is not None:
            await self._task
        await self._write(events, more=False)

    def close(self) -> None:
        """Nothing will be said any more but by `end`. Idempotent."""
        self._closed = True
        for timer in (self._alive_timer, self._flush_timer):
            if timer is not None:
                timer.cancel()

    async def _write(self, more_events: bytes = b"", *, more: bool = True) -> None:
        async with self._writing:
            data = self._first() + self._events() + more_events
            self._last_write = self._loop.time()
            if not self.started:
                self.started = True
                headers = [EVENTS, NO_CACHE]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            if data or not more:
                await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def _first(self) -> bytes:
        """The events that open the stream, once."""
        if self._opened:
            return b""
        self._opened = True
        return self._reply.first()

    def _events(self) -> bytes:
        """Of the tokens of which nothing was said yet."""
        events = b""
        for index, choice in self._choices.items():
            sampled = choice.sampled
            sampled.expected = False
            if choice.said < len(sampled.pieces):
                piece = sampled.since(choice.said)
                choice.said = len(sampled.pieces)
                if choice.text is None:
                    choice.text = self._new_text()
                if sampled.message is None:
                    delta = choice.text.feed(piece.tokens)
                else:
                    delta = choice.text.finish(sampled.message)
                events += self._reply.piece(index, piece, delta)
        return events

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

    def _may_leave_whole(self) -> bool:
        """Whether all was sampled and none has left, so that its record is worth waiting for."""
        if self._task is not None or not self._early or len(self._choices) < self._prompt.ask.n:
            return False
        return None not in [choice.sampled.pieces[-1].stop for choice in self._choices.values()]

    def _flush(self) -> None:
        self._flush_timer = None
        if not self._may_leave_whole():
            self._begin(b"")

    def _begin(self, events: bytes) -> None:
        self._task = self._loop.create_task(self._write(events))

    def _keep_alive(self) -> None:
        """Comments, which clients skip: a proxy or a client with a read timeout sees life."""
        due = self._last_write + KEEP_ALIVE_S
        if due <= self._loop.time():
            self._begin(b": keep-alive\n\n")
            due = self._loop.time() + KEEP_ALIVE_S
        self._alive_timer = self._loop.call_at(due, self._keep_alive)
