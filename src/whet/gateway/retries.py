"""Which requests are being answered, and which answers never reached their client.

Equal requests are not retries by themselves: an agent may want two samples. One is a retry if the
client says so, or if the answer to an equal one was lost on the way.
"""

from asyncio import Event
from collections import Counter, defaultdict
from types import TracebackType

from whet.types import AttemptId, CallId

Key = tuple[AttemptId, str]
"""An attempt and the digest of a request of its."""


class Retries:
    """What is known of the requests of this process; the store knows the recorded ones."""

    def __init__(self) -> None:
        self._running: defaultdict[Key, list[_Answering]] = defaultdict(list)
        self._lost: defaultdict[Key, list[CallId]] = defaultdict(list)
        self._unanswered: Counter[Key] = Counter()

    def answering(self, key: Key) -> "_Answering":
        """Around the sampling of an answer; one that fails or is given up leaves a debt."""
        return _Answering(key, self._running, self._unanswered)

    def running(self, key: Key) -> Event | None:
        """Set once the oldest of the equal requests under way has ended; None if there is none."""
        under_way = self._running.get(key)
        return under_way[0].ended() if under_way else None

    def lose(self, key: Key, call: CallId) -> None:
        """A recorded answer did not reach its client."""
        self._lost[key].append(call)

    def take_lost(self, key: Key) -> CallId | None:
        """The oldest lost answer, which is thereby on its way again."""
        lost = self._lost.get(key)
        if not lost:
            return None
        call = lost.pop(0)
        if not lost:
            del self._lost[key]
        return call

    def take_unanswered(self, key: Key) -> bool:
        """Whether an equal request went without any answer: this one stands for it."""
        if not self._unanswered[key]:
            del self._unanswered[key]
            return False
        self._unanswered[key] -= 1
        return True

    def forget(self, attempt: AttemptId) -> None:
        """Drop what is known of an attempt that nobody heard of for long."""
        for known in (self._lost, self._unanswered):
            for key in [key for key in known if key[0] == attempt]:
                del known[key]


class _Answering:
    """One request under way."""

    def __init__(
        self, key: Key, running: "dict[Key, list[_Answering]]", unanswered: Counter[Key]
    ) -> None:
        self._key = key
        self._running = running
        self._unanswered = unanswered
        self._ended: Event | None = None

    def ended(self) -> Event:
        """Set once it has; few ever ask."""
        if self._ended is None:
            self._ended = Event()
        return self._ended

    def __enter__(self) -> None:
        self._running[self._key].append(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._unanswered[self._key] += 1
        under_way = self._running[self._key]
        under_way.remove(self)
        if not under_way:
            del self._running[self._key]
        if self._ended is not None:
            self._ended.set()
