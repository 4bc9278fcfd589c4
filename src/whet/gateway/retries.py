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


class Answering:
    """An answer under way; one that fails or is given up leaves a debt."""

    # It stands around every call: an event that hardly anyone waits for is made when one does.
    __slots__ = ("_ended", "_key", "_retries")

    def __init__(self, retries: "Retries", key: Key) -> None:
        self._retries = retries
        self._key = key
        self._ended: Event | None = None

    async def wait(self) -> None:
        """Until it has ended, one way or the other."""
        if self._ended is None:
            self._ended = Event()
        await self._ended.wait()

    def __enter__(self) -> None:
        self._retries.begin(self._key, self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._retries.end(self._key, self, answered=kind is None)
        if self._ended is not None:
            self._ended.set()


class Retries:
    """What is known of the requests of this process; the store knows the recorded ones."""

    def __init__(self) -> None:
        self._running: dict[Key, list[Answering]] = {}
        self._lost: defaultdict[Key, list[CallId]] = defaultdict(list)
        self._unanswered: Counter[Key] = Counter()

    def answering(self, key: Key) -> Answering:
        """Around the sampling of an answer."""
        return Answering(self, key)

    def begin(self, key: Key, answering: Answering) -> None:
        """A request is being answered."""
        self._running.setdefault(key, []).append(answering)

    def end(self, key: Key, answering: Answering, *, answered: bool) -> None:
        """It is no more, well or ill."""
        alike = self._running[key]
        alike.remove(answering)
        if not alike:
            del self._running[key]
        if not answered:
            self._unanswered[key] += 1

    def running(self, key: Key) -> Answering | None:
        """The oldest of the equal requests under way, if there is any."""
        alike = self._running.get(key)
        return alike[0] if alike else None

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
        if key not in self._unanswered:
            return False
        self._unanswered[key] -= 1
        if not self._unanswered[key]:
            del self._unanswered[key]
        return True

    def forget(self, attempt: AttemptId) -> None:
        """Drop what is known of an attempt that nobody heard of for long."""
        for known in (self._lost, self._unanswered):
            for key in [key for key in known if key[0] == attempt]:
                del known[key]
