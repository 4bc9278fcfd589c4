"""Which of several equal servers a request goes to, and who waits while none has room.

Requests come from the gateway's event loop and weights from another, so nothing here belongs to
one: a waiter is woken in its own.
"""

import asyncio
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from whet.errors import EngineBusy, EngineError

HOMES_KEPT = 65_536
"""Affinities whose replica is remembered."""


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """What servers are to sample from."""

    version: int
    kind: Literal["base", "lora", "full"] = "base"
    """The model as the server loaded it, an adapter on top of it, or other weights for it."""
    folder: Path | None = None
    """An adapter or a model, where the servers see it."""
    model: str = ""
    """What servers call it; empty for their own model."""
    slots: int = 1
    """Versions that may be sampled from at once, this one among them."""


@dataclass(eq=False, slots=True)
class Replica:
    """One server."""

    url: str
    up: bool = True
    why: str = ""
    """Of one that is not up."""
    active: int = 0
    """Requests it was given and has not answered."""
    weights: ServedWeights = field(default_factory=lambda: ServedWeights(0))
    """What new requests are sampled from."""
    in_use: Counter[str] = field(default_factory=Counter[str])
    """Requests under way by what the server calls their weights."""
    breakers: set[Callable[[], None]] = field(default_factory=set[Callable[[], None]])
    """Each ends a request under way."""
    failures: int = 0
    """Checks in a row that it did not answer."""


@dataclass(eq=False, slots=True)
class _Waiter:
    affinity: str
    besides: Collection[Replica]
    loop: asyncio.AbstractEventLoop
    found: "asyncio.Future[Replica]"


class Replicas:
    """The servers of an engine.

    An affinity stays with the replica it was first given to, for the prefix that replica has in
    its cache, as long as that one is up and has room; a new one goes where least is under way.
    """

    def __init__(self, urls: Sequence[str], *, at_once: int, most_waiting: int) -> None:
        """At most `at_once` requests are given to a replica; further ones wait, up to a number."""
        self.all = [Replica(url) for url in urls]
        self._at_once = at_once
        self._most_waiting = most_waiting
        self._homes: OrderedDict[str, Replica] = OrderedDict()
        self._waiting: deque[_Waiter] = deque()
        self._lock = threading.Lock()
        self._held = False
        self._idle = threading.Condition(self._lock)

    @property
    def active(self) -> int:
        """How many requests are under way."""
        return sum(replica.active for replica in self.all)

    async def take(
        self, affinity: str, *, besides: Collection[Replica] = (), patience_s: float
    ) -> Replica:
        """A replica with room; it is to be given back. Those of `besides` only if no other is up.

        Raises:
            EngineBusy: too many wait already.
            EngineError: no replica came up for so long.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if not self._waiting and (found := self._pick(affinity, besides)):
                return found
            if len(self._waiting) >= self._most_waiting:
                raise EngineBusy(f"{len(self._waiting)} requests wait for a server: ask again")
            waiter = _Waiter(affinity, besides, loop, loop.create_future())
            self._waiting.append(waiter)
        try:
            while True:
                done, _ = await asyncio.wait([waiter.found], timeout=patience_s)
                if done:
                    return waiter.found.result()
                if not any(replica.up for replica in self.all):
                    raise EngineError(self.why_down())
        except BaseException:
            self._forget(waiter)
            raise

    def give(self, replica: Replica) -> None:
        """A request of a replica has ended."""
        with self._lock:
            replica.active -= 1
            self._hand_out()
            self._idle.notify_all()

    def mark_up(self, replica: Replica) -> None:
        """It may be given requests."""
        with self._lock:
            replica.up, replica.why, replica.failures = True, "", 0
            self._hand_out()

    def mark_down(self, replica: Replica, why: str) -> None:
        """It is given no more requests until it is up again."""
        with self._lock:
            replica.up, replica.why = False, why

    def hold(self) -> None:
        """Give out no more requests, and return once none is under way. Blocks its thread."""
        with self._lock:
            self._held = True
            self._idle.wait_for(lambda: not any(replica.active for replica in self.all))

    def resume(self) -> None:
        """Give out requests again."""
        with self._lock:
            self._held = False
            self._hand_out()

    def why_down(self) -> str:
        """What is wrong with each replica that is not up, in one line."""
        return "; ".join(f"{r.url} is not there: {r.why}" for r in self.all if not r.up)

    # ------------------------------------------------------------- with the lock

    def _pick(self, affinity: str, besides: Collection[Replica]) -> Replica | None:
        if self._held:
            return None
        there = [replica for replica in self.all if replica.up]
        able = [r for r in there if r not in besides] or there
        able = [replica for replica in able if replica.active < self._at_once]
        if not able:
            return None
        found = self._homes.get(affinity)
        if found not in able:
            found = min(able, key=lambda replica: replica.active)
        if affinity:
            self._homes[affinity] = found
            self._homes.move_to_end(affinity)
            while len(self._homes) > HOMES_KEPT:
                self._homes.popitem(last=False)
        found.active += 1
        return found

    def _hand_out(self) -> None:
        while self._waiting:
            waiter = self._waiting[0]
            found = self._pick(waiter.affinity, waiter.besides)
            if found is None:
                return
            self._waiting.popleft()
            with suppress(RuntimeError):  # its loop is closed, and nobody waits any more
                waiter.loop.call_soon_threadsafe(self._deliver, waiter, found)
                continue
            found.active -= 1

    def _deliver(self, waiter: _Waiter, found: Replica) -> None:
        if waiter.found.done():
            self.give(found)
        else:
            waiter.found.set_result(found)

    def _forget(self, waiter: _Waiter) -> None:
        with self._lock, suppress(ValueError):
            self._waiting.remove(waiter)
        if waiter.found.done() and not waiter.found.cancelled():
            self.give(waiter.found.result())
        waiter.found.cancel()
