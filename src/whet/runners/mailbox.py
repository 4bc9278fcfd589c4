"""Calls into the event loop of another thread."""

import asyncio
import contextvars
import logging
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Mailbox:
    """Has a loop call things in turn, and wakes it once for all that wait: waking is what costs."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_woken = False
        self._context = contextvars.Context()
        """Of no attempt, whoever posts."""

    def post(self, act: Callable[[], None]) -> None:
        """Have it called soon, from any thread; never, if the loop is closed."""
        self._waiting.append(act)
        if not self._is_woken:
            self._is_woken = True
            try:
                self._loop.call_soon_threadsafe(self._empty, context=self._context)
            except RuntimeError:
                logger.debug("the loop is closed")

    def _empty(self) -> None:
        # First: what is posted from now on wakes the loop again, or is found below.
        self._is_woken = False
        while self._waiting:
            self._waiting.popleft()()
