"""Map from open spans to the attempts that created them."""

import logging
from collections.abc import Callable, Hashable
from weakref import WeakValueDictionary

from whet.errors import WhetError, boundary
from whet.runners.context import AttemptContext, active_attempt
from whet.types import Span

logger = logging.getLogger(__name__)


class SpanOwners:
    """The attempts in which spans were started, until they end.

    The context in which a span ends does not count: a span that an attempt left open may be closed
    by the event loop in the context of another one.
    """

    def __init__(self) -> None:
        # Weak: a span that never ends must not keep its attempt.
        self._open = WeakValueDictionary[Hashable, AttemptContext]()

    def start(self, key: Hashable) -> AttemptContext | None:
        """Register a span that starts; returns its attempt, if there is one."""
        context = active_attempt.get()
        if context is not None:
            self._open[key] = context
        return context

    def end(self, key: Hashable, convert: Callable[[], Span]) -> None:
        """Add a span that ends to its attempt, unless the attempt has ended before.

        A span that cannot be converted is logged: it must not fail the agent that ends it.
        """
        context = self._open.pop(key, None)
        if context is None or context.has_ended:
            return
        try:
            with boundary(WhetError, "cannot record a span of the agent's SDK"):
                context.add_span(convert())
        except WhetError as error:
            logger.warning("%s attempt=%s", error, context.attempt.id)
