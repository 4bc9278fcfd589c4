"""The client's one retry layer: sends a request until the server responds to it.

Every request may be sent again, as each is idempotent by its ids or by its Idempotency-Key. So
whatever leaves the outcome unknown (no connection, a lost response, a 5xx, a timeout) is answered
by sending the same bytes again after a pause, until `patience_s` is over. A 4xx is an answer and is
raised. Nothing above this layer retries; the queue retries attempts, not requests.
"""

import asyncio
import gzip
import logging
import random
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Coroutine, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import anyio
from pydantic import TypeAdapter, ValidationError

from whet.errors import ConfigError, StoreClosed, StoreError, boundary
from whet.io.http_client import HttpClient, Response, TransportError, is_loopback
from whet.store.http.errors import ErrorBody, ErrorDetail, from_http
from whet.store.http.rpc import parse_json

logger = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_S = 60.0
"""Request timeout."""
PAUSES_S = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Pauses before retries, the last one for all further ones. The first is 0, as the server may have
closed an idle connection."""
KEEPALIVE_S = 60.0
"""Shorter than our server keeps an idle connection."""
GZIP_FROM = 1024
"""Bytes of the smallest body worth compressing."""
CHUNK = 2**18

_ERROR = TypeAdapter(ErrorBody)


class Unreachable(StoreError):
    """No response for longer than the client's patience."""


class Request(NamedTuple):
    """A request that may be sent more than once."""

    verb: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = {}
    upload: Path | None = None
    """File that is the body."""
    download: Path | None = None
    """File that receives the body of a success."""


class RetryingClient:
    """Connection to one server, with a thread and an event loop of its own.

    So a client may be used from any number of event loops, and none of them blocks another.
    """

    def __init__(self, url: str, token: str, *, patience_s: float) -> None:
        """Raises ConfigError if the URL is invalid."""
        self._url = url.rstrip("/")
        self._patience_s = patience_s
        # On one machine compression costs more than it saves.
        self._compresses = not is_loopback(_parse_host(url))
        headers = {"Accept-Encoding": "gzip"} if self._compresses else {}
        self._http = HttpClient(token=token, headers=headers, keepalive_s=KEEPALIVE_S)
        self._down_since: float | None = None
        self._closing = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="whet-store-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the client's loop. Raises StoreClosed."""
        with self._closing:
            if self._closed:
                work.close()
                raise StoreClosed("the store is closed")
            return asyncio.run_coroutine_threadsafe(self._finish(work), self._loop)

    async def send(
        self, request: Request, *, timeout_s: float = TIMEOUT_S, patience_s: float | None = None
    ) -> Response:
        """Send a request until there is a response, and return that if it is a success.

        Raises:
            StoreError: the server refused it.
            Unreachable: there was no response within the patience.
        """
        if self._compresses and len(request.body) >= GZIP_FROM:
            headers = {**request.headers, "Content-Encoding": "gzip"}
            request = request._replace(body=gzip.compress(request.body, 1), headers=headers)
        loop = asyncio.get_running_loop()
        patience_s = self._patience_s if patience_s is None else patience_s
        began, tries = loop.time(), 0
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    response = await self._exchange(request)
                if response.status < 500:
                    self._mark_up(loop.time())
                    return self._check(response)
                reason = _read_error(response).message
            except TimeoutError:
                reason = f"no response for {timeout_s:g} s"
            except TransportError as error:
                reason = str(error)
            waited_s = loop.time() - began
            if waited_s >= patience_s:
                raise Unreachable(
                    f"no response from the store at {self._url} for {waited_s:.0f} s: {reason}"
                )
            if tries:
                self._mark_down(loop.time(), reason, patience_s)
            pause_s = PAUSES_S[min(tries, len(PAUSES_S) - 1)] * random.uniform(0.5, 1.0)
            tries += 1
            await asyncio.sleep(min(pause_s, patience_s - waited_s))

    def close(self) -> None:
        """Cancel what is in progress, which raises StoreClosed. Idempotent."""
        with self._closing:
            if not self._closed:
                self._closed = True
                asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ------------------------------------------------------------------ one exchange

    async def _exchange(self, request: Request) -> Response:
        body = _read_chunks(request.upload) if request.upload else request.body
        url = self._url + request.path
        async with self._http.stream(
            request.verb, url, body=body, headers=request.headers
        ) as response:
            if request.download is None or response.status != 200:
                return Response(response.status, response.headers, await response.read())
            await _save(response.content.iter_chunked(CHUNK), request.download)
            return Response(response.status, response.headers, b"")

    def _check(self, response: Response) -> Response:
        if response.status < 400:
            return response
        if response.status == 401:
            raise ConfigError(
                f"the store at {self._url} refuses the token: set WHET_STORE_TOKEN to the one that"
                " it printed when it was started first"
            )
        raise from_http(_read_error(response))

    def _mark_down(self, now: float, reason: str, patience_s: float) -> None:
        if self._down_since is None:
            self._down_since = now
            logger.warning(
                "store unreachable, retrying url=%s up_to_s=%g error=%s",
                self._url,
                patience_s,
                reason,
            )

    def _mark_up(self, now: float) -> None:
        if self._down_since is not None:
            logger.warning(
                "store reachable again url=%s after_s=%.1f", self._url, now - self._down_since
            )
            self._down_since = None

    # ------------------------------------------------------------------ the loop

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except asyncio.CancelledError:
            if self._closed:
                raise StoreClosed("the store is closed") from None
            raise

    async def _stop(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.close()
        # After the callbacks that hand the results to other threads.
        self._loop.call_soon(self._loop.stop)


def _read_error(response: Response) -> ErrorDetail:
    try:
        return parse_json(_ERROR, response.body).error
    except (StoreError, ValidationError):  # another server is at this address
        text = response.body[:200].decode(errors="replace")
        return ErrorDetail(code="unknown", message=f"status {response.status}: {text}")


async def _read_chunks(file: Path) -> AsyncGenerator[bytes]:
    async with await anyio.open_file(file, "rb") as source:
        while chunk := await source.read(CHUNK):
            yield chunk


async def _save(chunks: AsyncIterable[bytes], file: Path) -> None:
    """Write a body to a file. Raises StoreError if that fails; other errors are of the network."""
    error = boundary(StoreError, "cannot write the file")
    with error:
        target = await anyio.open_file(file, "wb")
    try:
        async for chunk in chunks:
            with error:
                await target.write(chunk)
    finally:
        with error:
            await target.aclose()


def _parse_host(url: str) -> str:
    """Return the host of a URL. Raises ConfigError if the URL is invalid."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"invalid store URL {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not host or port == 0 or parts.query:
        raise ConfigError(f"invalid store URL {url!r}: expected http://host:port")
    return host
