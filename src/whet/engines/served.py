"""Samples from servers elsewhere over HTTP: token ids in, token ids and log-probabilities out."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import aiohttp
import anyio
from anyio import to_thread
from pydantic_core import from_json

from whet.engines.replicas import Replica, Replicas, ServedWeights
from whet.engines.request import Drawn, Request, room_after
from whet.errors import ConfigError, EngineError, RequestError
from whet.protocols import Engine
from whet.types import Piece, Sampling, join_pieces

logger = logging.getLogger(__name__)

Json = Mapping[str, Any]

TRIES = 3
"""Replicas a request is given to before its failure is told."""
PATIENCE_S = 60.0
"""How long a request waits while no replica is up."""
CHECK_UP_S, CHECK_DOWN_S = 5.0, 0.5
"""Between two looks at a replica that is up, and at one that is not."""
CHECK_TIMEOUT_S = 15.0
MOST_FAILURES = 3
"""Checks in a row without an answer: what is under way there is lost."""
CONNECT_S = 10.0
FAULTS = (aiohttp.ClientError, OSError, RuntimeError, ValueError, LookupError, TypeError)
"""Of a connection, or one closed on this side, which is a RuntimeError; and of an answer that is
not what it should be."""


class ReplicaFailed(Exception):
    """A replica did not do what it should; another may."""


class Server(Protocol):
    """How one kind of server is spoken to. Knows no replicas."""

    name: str
    path: str
    """Where requests to sample go."""
    context_length: int
    """Most tokens of a prompt and its answer."""

    def body(self, request: Request, weights: ServedWeights, *, stream: bool) -> Json:
        """What is sent. Raises RequestError for what this server cannot do."""
        ...

    def read(self, said: Json, request: Request) -> Drawn:
        """What a reply, or an event of a stream, adds to what the request has. Raises
        ReplicaFailed."""
        ...

    async def check(self, http: "Http", url: str) -> None:
        """Return if the server is well. Raises ReplicaFailed."""
        ...

    async def put(self, http: "Http", url: str, weights: ServedWeights) -> None:
        """Have it serve weights. Raises EngineError if it cannot, ReplicaFailed if it is gone."""
        ...

    async def drop(self, http: "Http", url: str, model: str) -> None:
        """Have it forget weights that nobody uses. Raises ReplicaFailed."""
        ...


class Http:
    """A session for each event loop that asks; a session belongs to the loop it was made in."""

    def __init__(self) -> None:
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

    def session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if loop not in self._sessions:
            # Sampling takes as long as it takes: who is gone is told by its connection or by the
            # checks, not by a clock.
            self._sessions[loop] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._sessions[loop]

    async def ask(
        self, url: str, body: Json | None = None, *, timeout_s: float = CHECK_TIMEOUT_S
    ) -> tuple[int, Any]:
        """Status and answer, as JSON if it is: of a GET, or of a POST if there is a body.

        Raises:
            ReplicaFailed: there is no answer.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        how = "GET" if body is None else "POST"
        try:
            request = self.session().request(how, url, json=body, timeout=timeout)
            async with request as response:
                said = await response.read()
        except FAULTS as error:
            raise ReplicaFailed(reason(error)) from error
        with suppress(ValueError):
            return response.status, json.loads(said)
        return response.status, said.decode(errors="replace")

    async def close(self) -> None:
        """Close every session in its own loop; what is under way there fails."""
        here = asyncio.get_running_loop()
        for loop, session in self._sessions.items():
            if loop is here:
                await session.close()
            elif loop.is_running():
                closing = asyncio.run_coroutine_threadsafe(session.close(), loop)
                await asyncio.wrap_future(closing)
        self._sessions.clear()


class ServedEngine(Engine):
    """Replicas of one server behind the engine's protocol.

    A request that fails before any of its tokens was handed out is given to another replica. One
    generation is of one version: weights are changed under none, servers keep the old ones until
    their last request has ended.
    """

    def __init__(
        self,
        server: Server,
        replicas: Replicas,
        decode: Callable[[Sequence[int]], str],
        *,
        http: Http,
        max_context: int | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`decode` turns ids into text, for stop strings alone."""
        self._server = server
        self._replicas = replicas
        self._decode = decode
        self._http = http
        self._patience_s = patience_s
        self.context_length = min(max_context or server.context_length, server.context_length)
        self._weights = ServedWeights(0)
        self._watch: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def version(self) -> int:
        """Of the weights that new requests are sampled from."""
        return self._weights.version

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        stream: bool = False,
        affinity: str = "",
    ) -> AsyncGenerator[Piece]:
        room = room_after(prompt, self.context_length)
        tokens, failed = list(prompt), set[Replica]()
        while True:
            self._begin()
            request = Request(
                tokens=tokens.copy(),
                sampling=sampling,
                limit=min(sampling.max_tokens or room, room),
                stream=stream,
                seed=0,  # the server draws
            )
            replica = await self._replicas.take(
                affinity, besides=failed, patience_s=self._patience_s
            )
            pieces = self._sample(replica, request)
            try:
                async for piece in pieces:
                    yield piece
                return
            except ReplicaFailed as error:
                self._fail(replica, request, failed, error)
            finally:
                # Before the next one is asked: its place and its connection are free.
                await pieces.aclose()
                self._replicas.give(replica)

    async def load(self, weights: ServedWeights) -> None:
        """Serve these: every request that begins once this has returned is sampled from them.

        Raises:
            EngineError: a server cannot take them, or none is there.
        """
        if weights.kind == "full":
            # All replicas at once, and with nobody sampling: a generation is of one version.
            await to_thread.run_sync(self._replicas.hold, abandon_on_cancel=True)
        try:
            self._weights = weights
            there = [replica for replica in self._replicas.all if replica.up]
            await asyncio.gather(*(self._put(replica) for replica in there))
        finally:
            if weights.kind == "full":
                self._replicas.resume()
        if not any(replica.up for replica in self._replicas.all):
            raise EngineError(self._replicas.why_down())

    async def close(self) -> None:
        self._closed = True
        watch, self._watch = self._watch, None
        if watch is not None:
            loop = watch.get_loop()
            with suppress(RuntimeError):  # its loop is closed, and it with that
                loop.call_soon_threadsafe(watch.cancel)
        with anyio.CancelScope(shield=True):  # whoever is told to stop still lets go
            await self._http.close()

    # ------------------------------------------------------------- one request

    def _begin(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if self._watch is None:
            self._watch = asyncio.create_task(self._look_after())

    async def _sample(self, replica: Replica, request: Request) -> AsyncGenerator[Piece]:
        """The pieces of a request from one replica. Raises ReplicaFailed."""
        weights = replica.weights
        streamed = request.stream or bool(request.sampling.stop)
        body = self._server.body(request, weights, stream=streamed)
        async with self._asked(replica, weights.model, body) as response:
            if not streamed:
                drawn = self._server.read(from_json(await response.read()), request)
                yield _whole(request, drawn, weights.version, self._decode)
                return
            async for events in _events(response):
                pieces, over = self._take(events, request, weights.version)
                if pieces:
                    yield join_pieces(pieces)
                    if pieces[-1].stop:
                        if over:  # the connection can be kept
                            await response.content.read()
                        return
            raise ReplicaFailed("its answer broke off")

    def _take(
        self, events: Sequence[Json], request: Request, version: int
    ) -> tuple[list[Piece], bool]:
        """What events add, up to the request's end, and whether that is the server's too."""
        pieces: list[Piece] = []
        for said in events:
            drawn = self._server.read(said, request)
            for part in _singly(drawn) if request.sampling.stop else (drawn,):
                piece = request.take(part, version, self._decode)
                if piece is not None:
                    pieces.append(piece)
                    if piece.stop:
                        return pieces, drawn.end is not None
        return pieces, False

    @asynccontextmanager
    async def _asked(
        self, replica: Replica, model: str, body: Json
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """A replica's answer; one that is left before its end stops the sampling there."""
        replica.in_use[model] += 1
        try:
            async with self._http.session().post(
                replica.url + self._server.path, json=body
            ) as response:
                if response.status != 200:
                    raise await self._refusal(response)
                replica.breakers.add(response.close)
                try:
                    yield response
                finally:
                    replica.breakers.discard(response.close)
                    response.close()
        except FAULTS as error:
            raise ReplicaFailed(reason(error)) from error
        finally:
            replica.in_use[model] -= 1

    async def _refusal(self, response: aiohttp.ClientResponse) -> Exception:
        said = (await response.read()).decode(errors="replace")
        what = f"{self._server.name} answers {response.status}: {error_text(said)}"
        if response.status in (400, 413, 422):
            return RequestError(what)
        # Weights that a server has forgotten are a 404: it was started again.
        return ReplicaFailed(what)

    def _fail(
        self, replica: Replica, request: Request, failed: set[Replica], error: ReplicaFailed
    ) -> None:
        """Note what a replica did; raises EngineError unless another may do better."""
        if self._closed:
            raise EngineError("the engine was closed") from error
        logger.warning("a server failed url=%s error=%s", replica.url, error)
        self._replicas.mark_down(replica, str(error))
        failed.add(replica)
        if request.delivered or len(failed) >= TRIES:
            raise EngineError(f"sampling at {replica.url} failed: {error}") from error

    # ------------------------------------------------------------- looking after replicas

    async def _look_after(self) -> None:
        await asyncio.gather(*(self._look_after_one(replica) for replica in self._replicas.all))

    async def _look_after_one(self, replica: Replica) -> None:
        while True:
            await asyncio.sleep(CHECK_UP_S if replica.up else CHECK_DOWN_S)
            try:
                await self._server.check(self._http, replica.url)
            except ReplicaFailed as error:
                replica.failures += 1
                if not replica.up or replica.failures >= MOST_FAILURES:
                    self._replicas.mark_down(replica, str(error))
                    for end in list(replica.breakers):
                        end()
                continue
            replica.failures = 0
            if not replica.up:
                with suppress(EngineError):
                    await self._put(replica)
            else:
                await self._forget_unused(replica)

    async def _put(self, replica: Replica) -> None:
        """Have a replica serve the weights of this engine; it is up then, and else down."""
        weights = self._weights
        try:
            await self._server.put(self._http, replica.url, weights)
        except ReplicaFailed as error:
            self._replicas.mark_down(replica, str(error))
            return
        except EngineError as error:
            self._replicas.mark_down(replica, str(error))
            raise
        if replica.weights.model:
            replica.in_use.setdefault(replica.weights.model, 0)
        replica.weights = weights
        self._replicas.mark_up(replica)
        await self._forget_unused(replica)

    async def _forget_unused(self, replica: Replica) -> None:
        current = replica.weights.model
        for model in [m for m, count in replica.in_use.items() if not count and m != current]:
            del replica.in_use[model]
            if model:
                with suppress(ReplicaFailed):
                    await self._server.drop(self._http, replica.url, model)


async def wait_until_well(
    server: Server,
    http: Http,
    url: str,
    *,
    alive: Callable[[], str | None],
    say: Callable[[str], None],
) -> None:
    """Return once a server answers; says so if it does not at first.

    Raises:
        ConfigError: whoever starts it has given up, which `alive` tells by a reason.
    """
    told = False
    while True:
        try:
            return await server.check(http, url)
        except ReplicaFailed as error:
            if (why := alive()) is not None:
                raise ConfigError(why) from error
            if not told:
                told = True
                say(f"waiting for {server.name} at {url}")
            await asyncio.sleep(CHECK_DOWN_S)


def _whole(
    request: Request, drawn: Drawn, version: int, decode: Callable[[Sequence[int]], str]
) -> Piece:
    piece = request.take(drawn, version, decode)
    if piece is None or piece.stop is None:
        raise ReplicaFailed(f"its answer ended after {len(drawn.tokens)} tokens without a reason")
    return piece


def _singly(drawn: Drawn) -> list[Drawn]:
    """The same tokens one by one: any of them may be the end."""
    last = len(drawn.tokens) - 1
    return [
        Drawn(
            [token],
            [drawn.logprobs[at]],
            drawn.tops[at : at + 1],
            drawn.end if at == last else None,
        )
        for at, token in enumerate(drawn.tokens)
    ] or [drawn]


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[list[Json]]:
    """What a stream of server-sent events says, up to its end; events that came at once as one."""
    rest = b""
    async for chunk in response.content.iter_any():
        *events, rest = (rest + chunk).split(b"\n\n")
        said: list[Json] = []
        for event in events:
            data = event.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                yield said
                return
            said.append(from_json(data))
            if "error" in said[-1]:
                raise ReplicaFailed(error_text(data.decode(errors="replace")))
        yield said


def error_text(said: str) -> str:
    """The sentence of an error that a server tells, whatever shape it has."""
    with suppress(ValueError):
        match json.loads(said):
            case {"error": {"message": str(text)}} | {"message": str(text)} | {"detail": str(text)}:
                said = text
            case {"error": str(text)}:
                said = text
            case _:
                pass
    return " ".join(said.split())[:300]


def reason(error: Exception) -> str:
    """An exception as one phrase."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
