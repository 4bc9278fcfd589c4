"""Whose the open spans are."""

from collections.abc import Hashable
from weakref import WeakValueDictionary

from whet.runners.running import Running, running


class Owners:
    """The attempts in which spans were begun, until they end.

    Where a span ends says nothing: what an attempt left open may be closed by the loop in the
    context of another one.
    """

    def __init__(self) -> None:
        # Weak: a span that never ends must not keep its attempt.
        self._open = WeakValueDictionary[Hashable, Running]()

    def begin(self, key: Hashable) -> Running | None:
        """Note that a span begins; gives the attempt, if it is in one."""
        now = running.get()
        if now is not None:
            self._open[key] = now
        return now

    def end(self, key: Hashable) -> Running | None:
        """Whose span ends; None if it is of no attempt, or of one that has ended."""
        now = self._open.pop(key, None)
        return None if now is None or now.has_ended else now
