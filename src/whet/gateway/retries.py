"""Which requests are being answered, and which answers never reached their client.

Equal requests are not retries by themselves: an agent may want two samples. One is a retry if the
client says so, or if the answer to an equal one was lost on the way.
"""

from asyncio import Event
from collections import Counter, defaultdict
from collections.abc import Generator
from contextlib import contextmanager

from whet.types import AttemptId, CallId

Key = tuple[AttemptId, str]
"""An attempt and the digest of a request of its."""


class Retries:
    """What is known of the requests of this process; the store knows the recorded ones."""

    def __init__(self) -> None:
        self._running: defaultdict[Key, list[Event]] = defaultdict(list)
        self._lost: defaultdict[Key, list[CallId]] = defaultdict(list)
        self._unanswered: Counter[Key] = Counter()

    @contextmanager
    def answering(self, key: Key) -> Generator[None]:
        """Around the sampling of an answer; one that fails or is given up leaves a debt."""
        ended = Event()
        self._running[key].append(ended)
        try:
            yield
        except BaseException:
            self._unanswered[key] += 1
            raise
        finally:
            self._running[key].remove(ended)
            if not self._running[key]:
                del self._running[key]
            ended.set()

    def running(self, key: Key) -> Event | None:
        """Set once the oldest of the equal requests under way has ended; None if there is none."""
        events = self._running.get(key)
        return events[0] if events else None

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
