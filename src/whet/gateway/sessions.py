"""State in memory between calls: graphs of running attempts, retries, rendered prompts."""

import asyncio
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from whet.gateway.graph import Graph
from whet.gateway.messages import Message
from whet.gateway.templates.renderer import RenderedPrompt
from whet.protocols import CallLog
from whet.types import Attempt, AttemptId, Call, CallId

MAX_GRAPH_TOKENS = 8_000_000
"""Tokens of graphs in memory, about a gigabyte; others are read back from the store on demand."""

MAX_ATTEMPTS = 10_000
ATTEMPT_CACHE_TTL_S = 1.0
"""Seconds for which an attempt counts as running before the store is read again: if it has ended
meanwhile, recording the call fails."""

MAX_PROMPT_TOKENS = 1_000_000
"""Tokens of rendered prompts in memory."""


class Sessions:
    """Cache of attempts and of their call graphs, read from the store once."""

    def __init__(self, log: CallLog, on_evict: Callable[[AttemptId], None]) -> None:
        """`on_evict` is called with each attempt whose graph leaves memory."""
        self._log = log
        self._on_evict = on_evict
        self._graphs: OrderedDict[AttemptId, Graph] = OrderedDict()
        self._size = 0
        """Tokens in the graphs."""
        self._loading: dict[AttemptId, asyncio.Event] = {}
        self._attempts: OrderedDict[AttemptId, tuple[Attempt, float]] = OrderedDict()
        """Running attempts, and until when they count as such."""

    async def find(self, id: AttemptId) -> tuple[Attempt, Graph]:
        """Return a running attempt and its graph. Raises as `CallLog.attempt` does."""
        attempt, expiry = self._attempts.get(id, (None, 0.0))
        if attempt is not None and time.monotonic() < expiry:
            return attempt, await self.load_graph(id)
        if id in self._graphs:
            return await self._load_attempt(id), await self.load_graph(id)
        # Both reads at once: a served store answers them in one round trip.
        return await asyncio.gather(self._load_attempt(id), self.load_graph(id))

    async def load_graph(self, id: AttemptId) -> Graph:
        """Return the graph of an attempt, running or not."""
        while id not in self._graphs:
            if (loading := self._loading.get(id)) is not None:
                await loading.wait()
            else:
                await self._load_graph(id)
        self._graphs.move_to_end(id)
        graph = self._graphs[id]
        while self._size > MAX_GRAPH_TOKENS and len(self._graphs) > 1:
            evicted, dropped = self._graphs.popitem(last=False)
            self._size -= dropped.size
            self._on_evict(evicted)
        return graph

    def get(self, id: AttemptId) -> Graph | None:
        """Return the graph of an attempt if it is in memory."""
        return self._graphs.get(id)

    async def add(
        self,
        call: Call,
        messages: Sequence[Message] | None = None,
        answers: Sequence[Message] | None = None,
        text: str | None = None,
    ) -> None:
        """Add a recorded call to its graph; the parameters are those of `Graph.add`."""
        graph = await self.load_graph(call.attempt)
        self._size -= graph.size
        graph.add(call, messages, answers, text)
        self._size += graph.size

    def expire(self, id: AttemptId) -> None:
        """Look the attempt up again at its next call."""
        self._attempts.pop(id, None)

    async def _load_attempt(self, id: AttemptId) -> Attempt:
        self._attempts.pop(id, None)
        attempt = await self._log.attempt(id)
        self._attempts[id] = attempt, time.monotonic() + ATTEMPT_CACHE_TTL_S
        while len(self._attempts) > MAX_ATTEMPTS:
            self._attempts.popitem(last=False)
        return attempt

    async def _load_graph(self, id: AttemptId) -> None:
        loaded = self._loading[id] = asyncio.Event()
        try:
            graph = Graph(await self._log.calls(id))
            self._graphs[id] = graph
            self._size += graph.size
        finally:
            del self._loading[id]
            loaded.set()


RequestKey = tuple[AttemptId, str]
"""An attempt and the digest of one of its requests."""


class RetryTracker:
    """Requests in flight, and replies that never reached their client.

    Equal requests are not retries by themselves: an agent may want two samples. One is a retry if
    the client marks it so, or if the reply to an equal one was lost. The tracker knows the requests
    of this process; the store has the recorded calls.
    """

    def __init__(self) -> None:
        self._in_flight: dict[RequestKey, list[asyncio.Event]] = {}
        self._undelivered: defaultdict[RequestKey, list[CallId]] = defaultdict(list)
        self._unanswered: Counter[RequestKey] = Counter()

    @contextmanager
    def track(self, key: RequestKey) -> Generator[None]:
        """Mark a request as being sampled and recorded; one that fails counts as unanswered."""
        done = asyncio.Event()
        self._in_flight.setdefault(key, []).append(done)
        try:
            yield
        except BaseException:
            self._unanswered[key] += 1
            raise
        finally:
            equal = self._in_flight[key]
            equal.remove(done)
            if not equal:
                del self._in_flight[key]
            done.set()

    def find_in_flight(self, key: RequestKey) -> asyncio.Event | None:
        """Return the end of the oldest equal request in flight, if there is any."""
        equal = self._in_flight.get(key)
        return equal[0] if equal else None

    def add_undelivered(self, key: RequestKey, call: CallId) -> None:
        """Remember that a recorded call did not reach its client."""
        self._undelivered[key].append(call)

    def pop_undelivered(self, key: RequestKey) -> CallId | None:
        """Remove and return the oldest undelivered call of equal requests."""
        undelivered = self._undelivered.get(key)
        if not undelivered:
            return None
        call = undelivered.pop(0)
        if not undelivered:
            del self._undelivered[key]
        return call

    def pop_unanswered(self, key: RequestKey) -> bool:
        """Return whether an equal request failed, and count this one as its replacement."""
        if key not in self._unanswered:
            return False
        self._unanswered[key] -= 1
        if not self._unanswered[key]:
            del self._unanswered[key]
        return True

    def evict(self, attempt: AttemptId) -> None:
        """Drop the state of an attempt."""
        for known in (self._undelivered, self._unanswered):
            for key in [key for key in known if key[0] == attempt]:
                del known[key]


PromptKey = tuple[str, tuple[Message, ...]]
"""Root of a conversation and all its messages."""


class PromptCache:
    """LRU cache of rendered prompts: the rollouts of a group all begin with the same one."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[PromptKey, RenderedPrompt] = OrderedDict()
        self._size = 0
        """Tokens in the prompts."""

    def get(self, key: PromptKey) -> RenderedPrompt | None:
        """Return a prompt, if cached."""
        if key in self._prompts:
            self._prompts.move_to_end(key)
        return self._prompts.get(key)

    def put(self, key: PromptKey, prompt: RenderedPrompt) -> None:
        """Add a prompt; the least recently used ones are evicted."""
        if key in self._prompts:
            self._size -= len(self._prompts.pop(key).ids)
        self._size += len(prompt.ids)
        self._prompts[key] = prompt
        while self._size > MAX_PROMPT_TOKENS:
            self._size -= len(self._prompts.popitem(last=False)[1].ids)
