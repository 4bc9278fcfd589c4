"""Engine over HTTP replicas: token ids in, token ids and log-probabilities out."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio
from anyio import to_thread
from pydantic_core import from_json

from whet.engines.remote.replicas import Replica, Replicas, WeightsSpec
from whet.engines.request import Decode, SampledTokens, SampleRequest, compute_remaining_context
from whet.errors import ConfigError, EngineError, RequestError
from whet.io.http_client import HttpClient, TransportError
from whet.io.threads import call_in_loop
from whet.protocols import Engine
from whet.types import Sampling, TokenChunk, join_chunks

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

JsonMap = Mapping[str, Any]

MAX_REPLICAS_PER_REQUEST = 3
"""Replicas a request is sent to before its failure is reported, or one of them as many times."""
WAIT_TIMEOUT_S = 60.0
"""How long a request waits while no replica is up."""
CHECK_INTERVAL_S, CHECK_DOWN_INTERVAL_S = 5.0, 0.5
"""Between two health checks of a replica that is up, and of one that is down."""
CHECK_TIMEOUT_S = 15.0
LOAD_TIMEOUT_S = 600.0
"""Timeout of loading weights."""
PROBE_TIMEOUT_S = 300.0
"""Timeout of the first reply, which may wait for compilation."""
MAX_FAILED_CHECKS = 3
"""Consecutive failed health checks after which a replica's requests are aborted."""
FAULTS = (TransportError, OSError, RuntimeError, ValueError, LookupError, TypeError)
"""Errors of a connection, of one closed on this side (RuntimeError), and of a malformed reply."""


class ReplicaFailed(Exception):
    """A replica failed; another one may succeed."""


class ServerApi(Protocol):
    """The HTTP API of one kind of server, such as vLLM."""

    name: str
    path: str
    """Path of sampling requests."""
    context_length: int
    """Maximum number of tokens of a prompt and its generation."""

    def request_body(
        self, request: SampleRequest, weights: WeightsSpec, *, stream: bool
    ) -> JsonMap:
        """Build a sampling request. Raises RequestError for unsupported settings."""
        ...

    def parse_reply(self, reply: JsonMap, request: SampleRequest) -> SampledTokens:
        """Read the new tokens from a reply or an event of a stream. Raises ReplicaFailed."""
        ...

    async def load_weights(self, http: HttpClient, url: str, weights: WeightsSpec) -> str:
        """Make the server load weights; returns the identity that it has with full weights.

        Raises:
            EngineError: it does not accept them.
            ReplicaFailed: it does not answer.
        """
        ...

    async def identify(self, http: HttpClient, url: str) -> str:
        """Return an identity that a restart changes, or nothing. Raises ReplicaFailed."""
        ...

    async def unload_weights(self, http: HttpClient, url: str, model: str) -> None:
        """Make the server drop weights that are no longer used. Raises ReplicaFailed."""
        ...


S = TypeVar("S", bound=ServerApi)


class RemoteEngine(Engine):
    """Replicas of one server behind the engine protocol.

    A request that fails before any of its tokens was returned is sent to another replica. All
    tokens of a generation are of one version: servers keep an adapter until its last request has
    ended, and full weights change only while no request is active.
    """

    def __init__(
        self,
        server: ServerApi,
        replicas: Replicas,
        decode: Decode,
        *,
        http: HttpClient,
        max_context: int | None = None,
        wait_timeout_s: float = WAIT_TIMEOUT_S,
    ) -> None:
        """`decode` is used for stop strings only."""
        self._server = server
        self._replicas = replicas
        self._decode = decode
        self._http = http
        self._identity_http = HttpClient()  # its connections do not count as those of requests
        self._wait_timeout_s = wait_timeout_s
        self.context_length = min(max_context or server.context_length, server.context_length)
        self._weights = WeightsSpec(0)
        self._monitor: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def version(self) -> int:
        """Version of the weights that new requests are sampled from."""
        return self._weights.version

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        stream: bool = False,
        affinity: str = "",
    ) -> AsyncGenerator[TokenChunk]:
        remaining = compute_remaining_context(prompt, self.context_length)
        tokens, failed = list(prompt), list[Replica]()
        while True:
            self._start_monitor()
            request = SampleRequest(
                tokens=tokens.copy(),
                sampling=sampling,
                limit=min(sampling.max_tokens or remaining, remaining),
                stream=stream,
                seed=0,  # unused: the server samples
            )
            replica = await self._replicas.acquire(
                affinity, exclude=failed, wait_timeout_s=self._wait_timeout_s
            )
            chunks = self._sample(replica, request)
            try:
                async for chunk in chunks:
                    yield chunk
                return
            except ReplicaFailed as error:
                self._record_failure(replica, request, failed, error)
            finally:
                # Before the next attempt: its place and its connection are free.
                await chunks.aclose()
                self._replicas.release(replica)

    async def load(self, weights: WeightsSpec) -> None:
        """Load weights; every request that begins after this has returned is sampled from them.

        Raises:
            EngineError: a server does not accept them, or none is up.
        """
        try:
            if weights.kind == "full":
                # All replicas together and without active requests: a generation is of one version.
                self._replicas.pause()
                await to_thread.run_sync(self._replicas.wait_until_idle, abandon_on_cancel=True)
            self._weights = weights
            up = [replica for replica in self._replicas.all if replica.up]
            await asyncio.gather(*(self._load_into(replica) for replica in up))
        finally:
            if weights.kind == "full":
                self._replicas.resume()
        if not any(replica.up for replica in self._replicas.all):
            raise EngineError(self._replicas.describe_down())

    async def close(self) -> None:
        self._closed = True
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            call_in_loop(monitor.get_loop(), monitor.cancel)
        with anyio.CancelScope(shield=True):  # connections are closed even when canceled
            await self._http.close()
            await self._identity_http.close()

    # ------------------------------------------------------------- one request

    async def _sample(self, replica: Replica, request: SampleRequest) -> AsyncGenerator[TokenChunk]:
        """The chunks of a request from one replica. Raises ReplicaFailed."""
        weights = replica.weights
        # Stop strings are found on this side, token by token.
        streamed = request.stream or bool(request.sampling.stop)
        body = self._server.request_body(request, weights, stream=streamed)
        async with self._post(replica, weights.model, body) as response:
            if replica.identity and self._http.connections > replica.verified:
                await self._verify(replica)
            if not streamed:
                reply = from_json(await response.read())
                sampled = _cut_at_stop_id(self._server.parse_reply(reply, request), request)
                yield _join_chunk(request, sampled, weights.version, self._decode)
                return
            async for events in _read_events(response):
                chunks, ended = self._append_events(events, request, weights.version)
                if chunks:
                    yield join_chunks(chunks)
                    if chunks[-1].stop:
                        if ended:  # read to the end, so that the connection can be reused
                            await response.content.read()
                        return
            raise ReplicaFailed("its reply ended early")

    def _append_events(
        self, events: Sequence[JsonMap], request: SampleRequest, version: int
    ) -> tuple[list[TokenChunk], bool]:
        """Append events up to the request's end; returns chunks, and whether the server ended."""
        chunks: list[TokenChunk] = []
        for event in events:
            sampled = _cut_at_stop_id(self._server.parse_reply(event, request), request)
            for part in _split_tokens(sampled) if request.sampling.stop else (sampled,):
                chunk = request.append(part, version, self._decode)
                if chunk is not None:
                    chunks.append(chunk)
                    if chunk.stop:
                        return chunks, sampled.stop is not None
        return chunks, False

    @asynccontextmanager
    async def _post(
        self, replica: Replica, model: str, body: JsonMap
    ) -> "AsyncGenerator[aiohttp.ClientResponse]":
        """A replica's response; leaving it early disconnects, which stops the sampling."""
        replica.in_use[model] += 1
        try:
            url = replica.url + self._server.path
            async with AsyncExitStack() as stack:
                sent = self._http.stream("POST", url, json=body)
                async with replica.abortable():  # until all is sampled, if it is not a stream
                    response = await stack.enter_async_context(sent)
                if response.status != 200:
                    raise await self._build_error(response, model)
                replica.aborts.add(response.close)
                try:
                    yield response
                finally:
                    replica.aborts.discard(response.close)
                    response.close()
        except FAULTS as error:
            raise ReplicaFailed(describe(error)) from error
        finally:
            replica.in_use[model] -= 1

    async def _build_error(self, response: "aiohttp.ClientResponse", model: str) -> Exception:
        text = (await response.read()).decode(errors="replace")
        message = f"{self._server.name} answers {response.status}: {read_error_text(text)}"
        # An adapter that a restarted server does not have: 404 of vLLM, 400 of SGLang.
        is_lost = bool(model) and model in text
        if response.status in (400, 413, 422) and not is_lost:
            return RequestError(message)
        return ReplicaFailed(message)

    def _record_failure(
        self, replica: Replica, request: SampleRequest, failed: list[Replica], error: ReplicaFailed
    ) -> None:
        """Mark a replica as down; raises EngineError unless another one may be tried."""
        if self._closed:
            raise EngineError("the engine was closed") from error
        logger.warning("a server failed url=%s error=%s", replica.url, error)
        self._replicas.mark_down(replica, str(error))
        failed.append(replica)
        if request.delivered or len(failed) >= MAX_REPLICAS_PER_REQUEST:
            raise EngineError(f"sampling at {replica.url} failed: {error}") from error

    # ------------------------------------------------------------- health of the replicas

    def _start_monitor(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if self._monitor is None:
            self._monitor = asyncio.create_task(self._monitor_all())

    async def _monitor_all(self) -> None:
        await asyncio.gather(*(self._monitor_one(replica) for replica in self._replicas.all))

    async def _monitor_one(self, replica: Replica) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S if replica.up else CHECK_DOWN_INTERVAL_S)
            try:
                await check_health(self._http, replica.url)
            except ReplicaFailed as error:
                replica.failed_checks += 1
                if not replica.up or replica.failed_checks >= MAX_FAILED_CHECKS:
                    self._replicas.mark_down(replica, str(error))
                    for abort in list(replica.aborts):
                        abort()
                continue
            if replica.up:
                await self._check_weights(replica)
            else:
                with suppress(EngineError):
                    await self._load_into(replica)
            replica.failed_checks = 0

    async def _check_weights(self, replica: Replica) -> None:
        """Mark a replica as down if it may have lost its weights: they are then loaded again."""
        try:
            if replica.identity:
                await self._verify(replica)
            elif replica.failed_checks and replica.weights.kind == "full":
                raise ReplicaFailed("it may have restarted")
        except ReplicaFailed as error:
            self._replicas.mark_down(replica, str(error))
        else:
            await self._unload_unused(replica)

    async def _verify(self, replica: Replica) -> None:
        """Raise ReplicaFailed if a server with full weights restarted: it has its own weights then.

        What came over a connection established before the comparison is of the same process.
        """
        connections = self._http.connections
        found = await self._server.identify(self._identity_http, replica.url)
        if found != replica.identity:
            raise ReplicaFailed(f"it restarted: it is {found!r}, and was {replica.identity!r}")
        replica.verified = max(connections, replica.verified)

    async def _load_into(self, replica: Replica) -> None:
        """Load the engine's weights into a replica; it is up afterwards, or else down."""
        weights = None
        try:
            while weights is not self._weights:  # `load` skips it while it is down
                weights = self._weights
                identity = await self._server.load_weights(self._http, replica.url, weights)
                if replica.weights.model:
                    replica.in_use.setdefault(replica.weights.model, 0)
                replica.weights = weights
                replica.identity, replica.verified = identity, -1
        except ReplicaFailed as error:
            self._replicas.mark_down(replica, str(error))
            return
        except EngineError as error:
            self._replicas.mark_down(replica, str(error))
            raise
        self._replicas.mark_up(replica)
        await self._unload_unused(replica)

    async def _unload_unused(self, replica: Replica) -> None:
        current = replica.weights.model
        for model in [m for m, count in replica.in_use.items() if not count and m != current]:
            del replica.in_use[model]
            if model:
                with suppress(ReplicaFailed):
                    await self._server.unload_weights(self._http, replica.url, model)


async def check_health(http: HttpClient, url: str) -> None:
    """Return if the server is healthy. Raises ReplicaFailed."""
    status, reply = await send(http, f"{url}/health")
    if status != 200:
        raise ReplicaFailed(f"/health answers {status}: {read_error_text(str(reply))}")


async def wait_until_healthy(
    http: HttpClient,
    url: str,
    *,
    name: str,
    startup_error: Callable[[], str | None],
    progress: Callable[[str], None],
) -> None:
    """Wait until a server is healthy; reports that it waits, if it has to.

    Raises:
        ConfigError: the server will not start, for the reason that `startup_error` returns.
    """
    reported = False
    while True:
        try:
            return await check_health(http, url)
        except ReplicaFailed as error:
            if (reason := startup_error()) is not None:
                raise ConfigError(reason) from error
            if not reported:
                reported = True
                progress(f"waiting for {name} at {url}")
            await asyncio.sleep(CHECK_DOWN_INTERVAL_S)


async def send(
    http: HttpClient, url: str, body: JsonMap | None = None, *, timeout_s: float = CHECK_TIMEOUT_S
) -> tuple[int, Any]:
    """GET, or POST a body; returns the status and the reply, parsed if it is JSON.

    Raises:
        ReplicaFailed: there is no reply.
    """
    method = "GET" if body is None else "POST"
    try:
        response = await http.request(method, url, json=body, timeout_s=timeout_s)
    except FAULTS as error:
        raise ReplicaFailed(describe(error)) from error
    with suppress(ValueError):
        return response.status, response.json()
    return response.status, response.body.decode(errors="replace")


async def probe(http: HttpClient, url: str, body: JsonMap | None = None) -> tuple[int, Any]:
    """`send` before an engine is built, with time for compilation. Raises ConfigError."""
    try:
        return await send(http, url, body, timeout_s=PROBE_TIMEOUT_S)
    except ReplicaFailed as error:
        raise ConfigError(f"the server does not answer at {url}: {error}") from error


def require_equal(servers: Sequence[S], urls: Sequence[str]) -> S:
    """Return the first of equal servers. Raises ConfigError if one differs."""
    first = servers[0]
    for url, other in zip(urls, servers, strict=True):
        if vars(other) != vars(first):
            different = [k for k, v in vars(other).items() if v != vars(first)[k]]
            raise ConfigError(
                f"the {first.name} servers at {urls[0]} and {url} differ ({', '.join(different)}): "
                "start them with the same model and flags"
            )
    return first


def read_error_text(reply: str) -> str:
    """The message of a server's error reply, whatever its shape."""
    with suppress(ValueError):
        match json.loads(reply):
            case {"error": {"message": str(text)}} | {"message": str(text)} | {"detail": str(text)}:
                reply = text
            case {"error": str(text)}:
                reply = text
            case _:
                pass
    return " ".join(reply.split())[:300]


def describe(error: Exception) -> str:
    """Describe an exception in one phrase."""
    if isinstance(error, TransportError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _join_chunk(
    request: SampleRequest, sampled: SampledTokens, version: int, decode: Decode
) -> TokenChunk:
    chunk = request.append(sampled, version, decode)
    if chunk is None or chunk.stop is None:
        raise ReplicaFailed(f"its reply ended after {len(sampled.tokens)} tokens without a reason")
    return chunk


def _cut_at_stop_id(sampled: SampledTokens, request: SampleRequest) -> SampledTokens:
    """Drop tokens after the first stop id, which a server may have sampled all the same."""
    for at, token in enumerate(sampled.tokens):
        if token in request.sampling.stop_ids:
            end = at + 1
            return SampledTokens(
                sampled.tokens[:end], sampled.logprobs[:end], sampled.tops[:end], "stop"
            )
    return sampled


def _split_tokens(sampled: SampledTokens) -> list[SampledTokens]:
    """Split tokens into single ones: any of them may complete a stop string."""
    last = len(sampled.tokens) - 1
    return [
        SampledTokens(
            [token],
            [sampled.logprobs[at]],
            sampled.tops[at : at + 1],
            sampled.stop if at == last else None,
        )
        for at, token in enumerate(sampled.tokens)
    ] or [sampled]


async def _read_events(response: "aiohttp.ClientResponse") -> AsyncGenerator[list[JsonMap]]:
    """Parse server-sent events up to the end of the stream; yields those that arrived together."""
    rest = b""
    async for data in response.content.iter_any():
        *lines, rest = (rest + data).split(b"\n\n")
        events: list[JsonMap] = []
        for line in lines:
            payload = line.removeprefix(b"data:").strip()
            if payload == b"[DONE]":
                yield events
                return
            events.append(from_json(payload))
            if "error" in events[-1]:
                raise ReplicaFailed(read_error_text(payload.decode(errors="replace")))
        yield events
