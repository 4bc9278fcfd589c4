"""An engine of another process, over a socket: both ends of the connection.

A frame is its length, its kind, the number of its request, and a payload: token ids and
log-probabilities as arrays, everything else as JSON. Both ends run on one machine, so numbers are
in its byte order. Nothing is unpickled.
"""

import asyncio
import json
import logging
import socket
import threading
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from enum import IntEnum
from itertools import count
from struct import Struct
from typing import cast

from anyio import CancelScope, to_thread

from whet.errors import EngineError, PromptTooLong, RequestError, WhetError
from whet.io.threads import call_in_loop
from whet.protocols import Engine
from whet.types import Attempt, Sampling, StopReason, TokenChunk, Value, join_chunks

logger = logging.getLogger(__name__)

HEADER = Struct("=IBI")
SIZES = Struct("=IIIBI")
"""Lengths of a chunk's tokens, log-probabilities and versions, its stop reason, and the bytes of
its top log-probabilities."""
LENGTH = Struct("=I")

STOPS: tuple[StopReason | None, ...] = (None, "stop", "length")
ERRORS: dict[str, type[WhetError]] = {
    kind.__name__: kind for kind in (EngineError, RequestError, PromptTooLong)
}
"""By name; others are sent as EngineError."""

Prepare = Callable[[Attempt], Awaitable[None]]


class FrameKind(IntEnum):
    """Kinds of frames: three requests, then three responses."""

    GENERATE = 1
    PREPARE = 2
    CANCEL = 3
    CHUNK = 4
    DONE = 5
    ERROR = 6


class _Options(Value):
    sampling: Sampling
    stream: bool
    affinity: str


class _Frames(asyncio.Protocol):
    """Splits what arrives into frames, and sends the frames of one turn of the loop together."""

    def __init__(
        self, receive: Callable[[int, int, bytes], None], lost: Callable[[], None]
    ) -> None:
        self._receive = receive
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport | None = None
        self._arrived = bytearray()
        self._unsent: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._arrived += data
        start = 0
        while len(self._arrived) - start >= HEADER.size:
            length, kind, number = HEADER.unpack_from(self._arrived, start)
            end = start + HEADER.size + length
            if len(self._arrived) < end:
                break
            self._receive(kind, number, bytes(self._arrived[start + HEADER.size : end]))
            start = end
        del self._arrived[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()

    def send(self, kind: FrameKind, number: int, payload: bytes = b"") -> None:
        """Send a frame; it is dropped if the connection is lost."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent += (HEADER.pack(len(payload), kind, number), payload)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if self._transport is not None:
            self._transport.write(b"".join(unsent))

    def close(self) -> None:
        """Send what is left, and close the connection."""
        self._flush()
        if self._transport is not None:
            self._transport.close()


# ------------------------------------------------------------------- the engine's process


class EngineServer:
    """Serves an engine at any number of sockets, in a thread with an event loop of its own."""

    def __init__(self, engine: Engine, prepare: Prepare | None = None) -> None:
        """`prepare` is that of `SocketEngine.prepare`."""
        self._engine = engine
        self._prepare = prepare
        self._loop = asyncio.new_event_loop()
        self._connections = set[_ServedConnection]()
        self._thread = threading.Thread(target=self._run, name="whet-engine-server", daemon=True)
        self._thread.start()

    async def add(self, sock: socket.socket) -> None:
        """Serve the process at the other end of a connected socket, until it closes its end."""
        sock.setblocking(False)
        served = asyncio.run_coroutine_threadsafe(self._serve(sock), self._loop)
        await asyncio.wrap_future(served)

    async def close(self) -> None:
        """Cancel requests in progress and close all sockets; the engine stays open. Idempotent."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        with CancelScope(shield=True):
            await to_thread.run_sync(self._thread.join)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _serve(self, sock: socket.socket) -> None:
        connection = _ServedConnection(self._engine, self._prepare, self._connections.discard)
        self._connections.add(connection)
        await self._loop.create_connection(lambda: connection.frames, sock=sock)

    async def _stop(self) -> None:
        tasks = [task for connection in set(self._connections) for task in connection.close()]
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports close in the next turn
        self._loop.stop()


class _ServedConnection:
    """One process that uses the engine, and its requests in progress."""

    def __init__(
        self,
        engine: Engine,
        prepare: Prepare | None,
        on_lost: Callable[["_ServedConnection"], None],
    ) -> None:
        self.frames = _Frames(self._receive, self._end)
        self._engine = engine
        self._prepare = prepare
        self._on_lost = on_lost
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def close(self) -> list[asyncio.Task[None]]:
        """Close the connection; returns its tasks, which are canceled."""
        tasks = list(self._tasks.values())
        self.frames.close()
        self._end()
        return tasks

    def _end(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._on_lost(self)

    def _receive(self, kind: int, number: int, payload: bytes) -> None:
        if kind == FrameKind.CANCEL:
            if task := self._tasks.get(number):
                task.cancel()
            return
        task = asyncio.create_task(self._answer(kind, number, payload))
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number))

    async def _answer(self, kind: int, number: int, payload: bytes) -> None:
        try:
            if kind == FrameKind.GENERATE:
                await self._generate(number, payload)
            elif self._prepare is not None:
                await self._prepare(Attempt.model_validate(json.loads(payload)))
            self.frames.send(FrameKind.DONE, number)
        except Exception as error:
            known = type(error).__name__ in ERRORS
            if not isinstance(error, WhetError):
                logger.exception("the engine failed")
            name = type(error).__name__ if known else EngineError.__name__
            self.frames.send(FrameKind.ERROR, number, json.dumps([name, str(error)]).encode())

    async def _generate(self, number: int, payload: bytes) -> None:
        options, prompt = _unpack_request(payload)
        chunks = self._engine.generate(
            prompt, options.sampling, stream=options.stream, affinity=options.affinity
        )
        async with aclosing(chunks):
            async for chunk in chunks:
                self.frames.send(FrameKind.CHUNK, number, _pack_chunk(chunk))


# ------------------------------------------------------------------- the other process


class SocketEngine(Engine):
    """The engine at the other end of a socket. All its requests come from one event loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._frames: _Frames | None = None
        self._connecting = asyncio.Lock()
        self._numbers = count(1)
        self._replies: dict[int, _Reply] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        stream: bool = False,
        affinity: str = "",
    ) -> AsyncGenerator[TokenChunk]:
        options = _Options(sampling=sampling, stream=stream, affinity=affinity)
        request = _pack_request(options, prompt)
        async with aclosing(self._request(FrameKind.GENERATE, request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def prepare(self, attempt: Attempt) -> None:
        """Return once the engine has loaded the weights for an attempt. Raises EngineError."""
        # Unlike pydantic's JSON, this has an escape for a lone surrogate in a task.
        request = json.dumps(attempt.model_dump(mode="json")).encode()
        async with aclosing(self._request(FrameKind.PREPARE, request)) as chunks:
            async for _ in chunks:
                pass

    async def close(self) -> None:
        """Fail what is in flight; the engine itself stays open. Idempotent, from any loop."""
        self._closed = True
        if self._loop is None or self._loop.is_closed():
            self._socket.close()
        elif self._loop is asyncio.get_running_loop():
            self._end()
        else:
            call_in_loop(self._loop, self._end)

    async def _request(self, kind: FrameKind, payload: bytes) -> AsyncGenerator[TokenChunk]:
        frames = await self._connect()
        number = next(self._numbers)
        reply = self._replies[number] = _Reply()
        frames.send(kind, number, payload)
        try:
            while (chunk := await reply.take()) is not None:
                yield chunk
        finally:
            del self._replies[number]
            if not reply.has_ended:
                frames.send(FrameKind.CANCEL, number)

    async def _connect(self) -> _Frames:
        async with self._connecting:
            if self._closed:
                raise EngineError("the engine is closed")
            if self._frames is None:
                self._loop = asyncio.get_running_loop()
                frames = _Frames(self._receive, self._end)
                await self._loop.create_connection(lambda: frames, sock=self._socket)
                self._frames = frames
            return self._frames

    def _receive(self, kind: int, number: int, payload: bytes) -> None:
        reply = self._replies.get(number)
        if reply is None:
            return  # canceled meanwhile
        if kind == FrameKind.CHUNK:
            reply.put(_unpack_chunk(payload))
        elif kind == FrameKind.DONE:
            reply.put(None)
        else:
            name, message = json.loads(payload)
            reply.put(ERRORS[name](message))

    def _end(self) -> None:
        self._closed = True
        if self._frames is not None:
            self._frames.close()
        for reply in self._replies.values():
            reply.put(EngineError("the engine is closed"))


class _Reply:
    """Chunks of one request that were not read yet, and its end: None or an error."""

    def __init__(self) -> None:
        self.has_ended = False
        self._chunks: deque[TokenChunk] = deque()
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def put(self, item: TokenChunk | Exception | None) -> None:
        """Add a chunk or the end; what follows the end is dropped."""
        if self.has_ended:
            return
        if isinstance(item, TokenChunk):
            self._chunks.append(item)
            self.has_ended = item.stop is not None
        else:
            self.has_ended, self._error = True, item
        self._ready.set()

    async def take(self) -> TokenChunk | None:
        """Wait for chunks and return all of them as one; None at the end. Raises its error."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self.has_ended:
                return None
            self._ready.clear()
            await self._ready.wait()
        chunks = list(self._chunks)
        self._chunks.clear()
        return join_chunks(chunks)


# ------------------------------------------------------------------- payloads


def _pack_request(options: _Options, prompt: Sequence[int]) -> bytes:
    try:
        head = options.model_dump_json().encode()
        return b"".join((LENGTH.pack(len(head)), head, array("q", prompt).tobytes()))
    except (OverflowError, ValueError) as error:  # an id of over 64 bits, or a lone surrogate
        raise RequestError(f"the request cannot be sent to the engine: {error}") from error


def _unpack_request(payload: bytes) -> tuple[_Options, tuple[int, ...]]:
    (length,) = LENGTH.unpack_from(payload)
    body = memoryview(payload)[LENGTH.size :]
    options = _Options.model_validate_json(bytes(body[:length]))
    return options, tuple(body[length:].cast("q"))


def _pack_chunk(chunk: TokenChunk) -> bytes:
    top = json.dumps(chunk.top).encode() if chunk.top else b""
    lengths = len(chunk.tokens), len(chunk.logprobs), len(chunk.versions)
    return b"".join(
        (
            SIZES.pack(*lengths, STOPS.index(chunk.stop), len(top)),
            array("q", chunk.tokens).tobytes(),
            array("d", chunk.logprobs).tobytes(),
            array("q", chunk.versions).tobytes(),
            top,
        )
    )


def _unpack_chunk(payload: bytes) -> TokenChunk:
    sizes: tuple[int, int, int, int, int] = SIZES.unpack_from(payload)
    tokens, logprobs, versions, stop, top = sizes
    body = memoryview(payload)[SIZES.size :]
    second = 8 * tokens
    third = second + 8 * logprobs
    end = third + 8 * versions
    tops = json.loads(bytes(body[end : end + top])) if top else ()
    return TokenChunk(
        tokens=tuple(body[:second].cast("q")),
        logprobs=tuple(body[second:third].cast("d")),
        versions=tuple(body[third:end].cast("q")),
        top=tuple(tuple((id, logprob) for id, logprob in position) for position in tops),
        stop=STOPS[stop],
    )
