"""Running attempts and their conversations, as far as they are held in memory."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from whet.gateway.graph import Graph
from whet.gateway.messages import Message
from whet.protocols import AttemptLog
from whet.types import Attempt, AttemptId, Call

TOKENS_KEPT = 8_000_000
"""Of conversations held in memory, which bounds it to about a gigabyte; the others are read back
from the store when they are continued."""

ATTEMPTS_KEPT = 10_000
BELIEVED_S = 1.0
"""An attempt that ran so short a time ago is not looked up again: should it have ended, what it is
served is refused when it is recorded."""


class Conversations:
    """What the store knows of attempts, read once."""

    def __init__(self, log: AttemptLog, forget: Callable[[AttemptId], None]) -> None:
        """`forget` is told of attempts that nobody heard of for long."""
        self._log = log
        self._forget = forget
        self._graphs: OrderedDict[AttemptId, Graph] = OrderedDict()
        self._held = 0
        """Tokens in the graphs."""
        self._loading: dict[AttemptId, asyncio.Event] = {}
        self._running: OrderedDict[AttemptId, tuple[Attempt, float]] = OrderedDict()

    async def find(self, id: AttemptId) -> tuple[Attempt, Graph]:
        """A running attempt and its graph. Raises as `AttemptLog.attempt` does."""
        attempt = self._believed(id)
        if attempt is None and id not in self._graphs:  # one way to the store for both
            return await asyncio.gather(self._attempt(id), self.graph(id))
        return attempt or await self._attempt(id), await self.graph(id)

    async def graph(self, id: AttemptId) -> Graph:
        """What is known of an attempt's conversations, running or not."""
        while id not in self._graphs:
            if (loading := self._loading.get(id)) is not None:
                await loading.wait()
            else:
                await self._load(id)
        self._graphs.move_to_end(id)
        graph = self._graphs[id]
        while self._held > TOKENS_KEPT and len(self._graphs) > 1:
            forgotten, dropped = self._graphs.popitem(last=False)
            self._held -= dropped.size
            self._forget(forgotten)
        return graph

    def held(self, id: AttemptId) -> Graph | None:
        """The graph of an attempt, if it is in memory."""
        return self._graphs.get(id)

    async def add(
        self,
        call: Call,
        messages: Sequence[Message] | None = None,
        answers: Sequence[Message] | None = None,
    ) -> None:
        """A call was recorded; `messages` and `answers` as in `Graph.add`."""
        graph = await self.graph(call.attempt)
        self._held -= graph.size
        graph.add(call, messages, answers)
        self._held += graph.size

    def ended(self, id: AttemptId) -> None:
        """The attempt turned out to have ended."""
        self._running.pop(id, None)

    def _believed(self, id: AttemptId) -> Attempt | None:
        attempt, until = self._running.get(id, (None, 0.0))
        return attempt if time.monotonic() < until else None

    async def _attempt(self, id: AttemptId) -> Attempt:
        self._running.pop(id, None)
        attempt = await self._log.attempt(id)
        self._running[id] = attempt, time.monotonic() + BELIEVED_S
        while len(self._running) > ATTEMPTS_KEPT:
            self._running.popitem(last=False)
        return attempt

    async def _load(self, id: AttemptId) -> None:
        loaded = self._loading[id] = asyncio.Event()
        try:
            graph = Graph(await self._log.calls(id))
            self._graphs[id] = graph
            self._held += graph.size
        finally:
            del self._loading[id]
            loaded.set()
