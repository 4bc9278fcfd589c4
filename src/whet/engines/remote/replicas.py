"""Load balancing over equal servers: affinity, limits of active requests, and a waiting queue.

Requests come from the gateway's event loop and weights from another, so nothing here belongs to
one event loop: a waiting request is woken in its own.
"""

import asyncio
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from whet.errors import EngineBusy, EngineError
from whet.io.threads import call_in_loop

MAX_AFFINITIES = 65_536
"""Affinities whose replica is remembered."""


@dataclass(frozen=True, slots=True)
class WeightsSpec:
    """A reference to the weights that servers load and sample from."""

    version: int
    """Policy version; see `LocalPolicy.version`."""
    kind: Literal["base", "lora", "full"] = "base"
    """The server's own model, a LoRA adapter on top of it, or other weights for all of it."""
    folder: Path | None = None
    """Folder of the adapter or model, as the servers see it."""
    model: str = ""
    """The adapter's name at the servers; empty for their own model."""
    max_versions: int = 1
    """Versions that may be sampled from at once, including this one."""


@dataclass(eq=False, slots=True)
class Replica:
    """One server."""

    url: str
    up: bool = True
    reason: str = ""
    """Why it is down."""
    active: int = 0
    """Requests sent to it and not finished."""
    weights: WeightsSpec = field(default_factory=lambda: WeightsSpec(0))
    """Weights that new requests are sampled from."""
    in_use: Counter[str] = field(default_factory=Counter[str])
    """Active requests by the name of their weights at the server."""
    aborts: set[Callable[[], None]] = field(default_factory=set[Callable[[], None]])
    """Each aborts one active request."""
    identity: str = ""
    """Identity of the process that has the weights; empty where a server has none."""
    verified: int = -1
    """Connections established when the identity was last compared."""
    failed_checks: int = 0
    """Consecutive health checks that failed."""

    @asynccontextmanager
    async def abortable(self) -> AsyncGenerator[None]:
        """Context in which an abort raises ConnectionAbortedError, with why the replica is down."""
        try:
            async with asyncio.timeout(None) as waiting:

                def abort() -> None:
                    self.aborts.discard(abort)
                    waiting.reschedule(0.0)

                self.aborts.add(abort)
                try:
                    yield
                finally:
                    self.aborts.discard(abort)
        except TimeoutError as error:
            raise ConnectionAbortedError(self.reason) from error


@dataclass(eq=False, slots=True)
class _Waiter:
    affinity: str
    exclude: Collection[Replica]
    loop: asyncio.AbstractEventLoop
    found: "asyncio.Future[Replica]"


class Replicas:
    """The replicas of an engine.

    Requests of one affinity go to the same replica, for the prefix in its cache, as long as it is
    up and below its limit; others go to the replica with the fewest active requests.
    """

    def __init__(self, urls: Sequence[str], *, max_active: int, max_waiting: int) -> None:
        """At most `max_active` requests are sent to a replica; up to `max_waiting` more wait."""
        self.all = [Replica(url) for url in urls]
        self._max_active = max_active
        self._max_waiting = max_waiting
        self._affinities: OrderedDict[str, Replica] = OrderedDict()
        self._waiting: deque[_Waiter] = deque()
        self._lock = threading.Lock()
        self._paused = False
        self._idle = threading.Condition(self._lock)

    @property
    def active(self) -> int:
        """Number of active requests."""
        return sum(replica.active for replica in self.all)

    async def acquire(
        self, affinity: str, *, exclude: Collection[Replica] = (), wait_timeout_s: float
    ) -> Replica:
        """Wait for a replica below its limit; those of `exclude` only if no other is up.

        The caller releases it.

        Raises:
            EngineBusy: too many requests wait already.
            EngineError: no replica came up within the timeout.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if not self._waiting and (found := self._pick(affinity, exclude)):
                return found
            if len(self._waiting) >= self._max_waiting:
                raise EngineBusy(f"{len(self._waiting)} requests wait for a server: retry later")
            waiter = _Waiter(affinity, exclude, loop, loop.create_future())
            self._waiting.append(waiter)
        try:
            while True:
                done, _ = await asyncio.wait([waiter.found], timeout=wait_timeout_s)
                if done:
                    return waiter.found.result()
                if not any(replica.up for replica in self.all):
                    raise EngineError(self.describe_down())
        except BaseException:
            self._withdraw(waiter)
            raise

    def release(self, replica: Replica) -> None:
        """Return a replica after a request has ended."""
        with self._lock:
            replica.active -= 1
            self._assign_waiting()
            self._idle.notify_all()

    def mark_up(self, replica: Replica) -> None:
        """Let a replica get requests."""
        with self._lock:
            replica.up, replica.reason, replica.failed_checks = True, "", 0
            self._assign_waiting()

    def mark_down(self, replica: Replica, reason: str) -> None:
        """Send a replica no more requests until it is up again."""
        with self._lock:
            replica.up, replica.reason = False, reason

    def pause(self) -> None:
        """Hold new requests back until `resume`."""
        with self._lock:
            self._paused = True

    def wait_until_idle(self) -> None:
        """Return once no request is active. Blocks the thread."""
        with self._lock:
            self._idle.wait_for(lambda: not any(replica.active for replica in self.all))

    def resume(self) -> None:
        """Let requests go again after `pause`."""
        with self._lock:
            self._paused = False
            self._assign_waiting()

    def describe_down(self) -> str:
        """The replicas that are down and why, in one line."""
        return "; ".join(f"{r.url} is down: {r.reason}" for r in self.all if not r.up)

    # ------------------------------------------------------------- under the lock

    def _pick(self, affinity: str, exclude: Collection[Replica]) -> Replica | None:
        if self._paused:
            return None
        up = [replica for replica in self.all if replica.up]
        able = [r for r in up if r not in exclude] or up
        able = [replica for replica in able if replica.active < self._max_active]
        if not able:
            return None
        found = self._affinities.get(affinity)
        if found not in able:
            found = min(able, key=lambda replica: replica.active)
        if affinity:
            self._affinities[affinity] = found
            self._affinities.move_to_end(affinity)
            while len(self._affinities) > MAX_AFFINITIES:
                self._affinities.popitem(last=False)
        found.active += 1
        return found

    def _assign_waiting(self) -> None:
        while self._waiting:
            waiter = self._waiting[0]
            found = self._pick(waiter.affinity, waiter.exclude)
            if found is None:
                return
            self._waiting.popleft()
            if not call_in_loop(waiter.loop, self._deliver, waiter, found):
                found.active -= 1

    def _deliver(self, waiter: _Waiter, found: Replica) -> None:
        if waiter.found.done():
            self.release(found)
        else:
            waiter.found.set_result(found)

    def _withdraw(self, waiter: _Waiter) -> None:
        with self._lock, suppress(ValueError):
            self._waiting.remove(waiter)
        if waiter.found.done() and not waiter.found.cancelled():
            self.release(waiter.found.result())
        waiter.found.cancel()
