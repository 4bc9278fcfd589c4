"""Whose the open spans are."""

import logging
from collections.abc import Callable, Hashable
from weakref import WeakValueDictionary

from whet.errors import WhetError, boundary
from whet.runners.running import Running, running
from whet.types import Span

logger = logging.getLogger(__name__)


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

    def end(self, key: Hashable, as_ours: Callable[[], Span]) -> None:
        """Keep a span that ends with its attempt, unless that has ended before.

        A span that is none is left out: it must not fail the agent that ends it.
        """
        now = self._open.pop(key, None)
        if now is None or now.has_ended:
            return
        try:
            with boundary(WhetError, "a span of the agent's SDK cannot be kept"):
                now.add_span(as_ours())
        except WhetError as error:
            logger.warning("%s attempt=%s", error, now.attempt.id)
