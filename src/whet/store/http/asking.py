"""Asks a server until it answers: what a client does while the server is started again."""

import asyncio
import logging
import random
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from whet.errors import ConfigError, StoreClosed, StoreError
from whet.store.http import gzipped
from whet.store.http.connection import Address, Connections, Disconnected, Reply, Request
from whet.store.http.gzipped import PACKED_FROM
from whet.store.http.loopback import is_loopback
from whet.store.http.problems import Problem, error_of
from whet.store.http.wire import Refusal, parse_json

try:
    from uvloop import new_event_loop
except ImportError:  # where there is none, such as on Windows
    from asyncio import new_event_loop

logger = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_S = 60.0
"""Without an answer for this long, a server is as good as gone."""
PAUSES_S = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Between tries; the last for all further ones. The first is none: an idle connection may have
been closed under us."""


class Unreachable(StoreError):
    """Nothing answers, for longer than the client is patient."""


class Asking:
    """All requests of a client to one server, in a thread and an event loop of their own.

    So the client may be used from any number of loops, and none of them can hold up another.
    """

    def __init__(self, url: str, token: str, *, patience_s: float) -> None:
        """Raises ConfigError if the URL is none."""
        self._url = url
        self._patience_s = patience_s
        address = Address.of(url)
        self._packs = not is_loopback(address.host)  # there, it costs more than it saves
        headers = {"Authorization": f"Bearer {token}"}
        if self._packs:
            headers["Accept-Encoding"] = "gzip"
        self._connections = Connections(address, headers)
        self._down_since: float | None = None
        self._closing = threading.Lock()
        self._closed = False
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._run, name="whet-store-client", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Have something done in the loop of the connections. Raises StoreClosed."""
        with self._closing:
            if self._closed:
                work.close()
                raise StoreClosed("the store is closed")
            return asyncio.run_coroutine_threadsafe(self._done(work), self._loop)

    async def ask(
        self, request: Request, *, timeout_s: float = TIMEOUT_S, patience_s: float | None = None
    ) -> Reply:
        """The answer to a request that may safely be sent again.

        Raises:
            StoreError: it was refused.
            Unreachable: nothing answered for as long as the client is patient.
        """
        if self._packs and len(request.body) >= PACKED_FROM:
            headers = {**request.headers, "Content-Encoding": "gzip"}
            request = request._replace(body=gzipped.pack(request.body), headers=headers)
        loop = asyncio.get_running_loop()
        patience_s = self._patience_s if patience_s is None else patience_s
        began, tries = loop.time(), 0
        while True:
            why = ""
            try:
                async with asyncio.timeout(timeout_s):
                    reply = await self._connections.ask(request)
                if reply.status < 500:
                    self._is_up(loop.time())
                    return self._checked(reply)
                why = _problem(reply).message
            except TimeoutError:
                why = f"no answer for {timeout_s:g} s"
            except (Disconnected, OSError) as error:
                why = str(error) or type(error).__name__
            waited_s = loop.time() - began
            if waited_s >= patience_s:
                raise Unreachable(
                    f"the store at {self._url} has not answered for {waited_s:.0f} s: {why}"
                )
            if tries:
                self._is_down(loop.time(), why, patience_s)
            pause_s = PAUSES_S[min(tries, len(PAUSES_S) - 1)] * random.uniform(0.5, 1.0)
            tries += 1
            await asyncio.sleep(min(pause_s, patience_s - waited_s))

    def close(self) -> None:
        """End what is under way with StoreClosed. Idempotent."""
        with self._closing:
            if not self._closed:
                self._closed = True
                asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _done(self, work: Coroutine[Any, Any, T]) -> T:
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
        self._connections.close()
        # Once what was scheduled for those who waited has been done.
        self._loop.call_soon(self._loop.stop)

    def _checked(self, reply: Reply) -> Reply:
        if reply.status < 400:
            return reply
        if reply.status == 401:
            raise ConfigError(
                f"the store at {self._url} refuses the token: set WHET_STORE_TOKEN to the one that"
                " it printed when it was started first"
            )
        raise error_of(_problem(reply))

    def _is_down(self, now: float, why: str, patience_s: float) -> None:
        if self._down_since is None:
            self._down_since = now
            logger.warning(
                "the store cannot be reached, waiting url=%s up_to_s=%g error=%s",
                self._url,
                patience_s,
                why,
            )

    def _is_up(self, now: float) -> None:
        if self._down_since is not None:
            logger.warning(
                "the store is back url=%s after_s=%.1f", self._url, now - self._down_since
            )
            self._down_since = None


def _problem(reply: Reply) -> Problem:
    try:
        return Refusal.model_validate(parse_json(reply.body)).error
    except (StoreError, ValueError):  # somebody else answers there
        text = reply.body[:200].decode(errors="replace")
        return Problem(code="unknown", message=f"status {reply.status}: {text}")
