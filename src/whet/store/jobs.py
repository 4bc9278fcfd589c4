"""Work for the threads of a database, handed over many at a time, and its results handed back."""

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from whet.errors import StoreClosed, WhetError

W = TypeVar("W")


class Job(NamedTuple, Generic[W]):
    """Something to do, and who waits for it."""

    work: W
    future: Future[Any] | asyncio.Future[Any]  # Any: jobs of all results share one queue
    loop: asyncio.AbstractEventLoop | None = None
    """Where the future belongs, if to an event loop."""

    def begin(self) -> bool:
        """Whether somebody still wants it."""
        if isinstance(self.future, asyncio.Future):
            return not self.future.cancelled()
        return self.future.set_running_or_notify_cancel()


@dataclass(slots=True)
class _Asked(Generic[W]):
    """What an event loop has asked for and nobody has begun."""

    gathered_until: float
    jobs: list[Job[W]] = field(default_factory=list[Job[W]])
    seen: int = 0
    """Of the jobs, those that were there a turn ago."""


class Inbox(Generic[W]):
    """What waits for a thread, which takes all of it at once.

    What is asked for in one turn of an event loop is handed over together: a thread that woke up
    for the first of many would do them one by one.
    """

    def __init__(
        self, do_here: Callable[[Sequence[Job[W]]], bool], *, gather_s: float = 0.0
    ) -> None:
        """`do_here` may do all that a loop asks for in the loop's own thread; says if it did.

        For `gather_s` at most, what a loop asks for is gathered while each of its turns adds to it.
        """
        self._do_here = do_here
        self._gather_s = gather_s
        self._jobs = SimpleQueue[Job[W] | None]()
        self._asked: dict[asyncio.AbstractEventLoop, _Asked[W]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, work: W) -> asyncio.Future[Any]:
        """Have it done; the future is of the running event loop. Raises StoreClosed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        with self._lock:
            self._check_open()
            asked = self._asked.get(loop)
            if asked is None:
                asked = self._asked[loop] = _Asked(time.monotonic() + self._gather_s)
                loop.call_soon(self._turn_ended, loop)
            asked.jobs.append(Job(work, future, loop))
        return future

    def put(self, job: Job[W]) -> None:
        """Raises StoreClosed."""
        with self._lock:
            self._check_open()
            self._jobs.put(job)

    def close(self) -> None:
        """Take no more, and wake who takes. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for asked in self._asked.values():
                    self._hand_over(asked.jobs)
                self._asked.clear()
                self._jobs.put(None)

    def _turn_ended(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            asked = self._asked.get(loop)
            if asked is None:
                return  # it was closed
            more = len(asked.jobs) > asked.seen
            if more and time.monotonic() < asked.gathered_until:
                asked.seen = len(asked.jobs)
                loop.call_soon(self._turn_ended, loop)
                return
            del self._asked[loop]
        if self._do_here(asked.jobs):
            return
        with self._lock:
            if not self._closed:
                self._hand_over(asked.jobs)
                return
        deliver((job, _closed()) for job in asked.jobs)

    def _hand_over(self, jobs: Iterable[Job[W]]) -> None:
        for job in jobs:
            self._jobs.put(job)

    def _check_open(self) -> None:
        if self._closed:
            raise _closed()

    def take(self, timeout_s: float | None = None) -> tuple[list[Job[W]], bool]:
        """All that waits, or nothing in time; and whether there may be more."""
        try:
            taken = [self._jobs.get(timeout=timeout_s)]
        except Empty:
            return [], True
        taken += self._take_now()
        return [job for job in taken if job], None not in taken

    def refuse(self, error: WhetError) -> None:
        """Close, and tell this to all who wait."""
        self.close()
        deliver((job, error) for job in self._take_now() if job)

    def _take_now(self) -> list[Job[W] | None]:
        jobs: list[Job[W] | None] = []
        with suppress(Empty):
            for _ in range(self._jobs.qsize()):
                jobs.append(self._jobs.get_nowait())
        return jobs


def _closed() -> StoreClosed:
    return StoreClosed("the store is closed")


Reply = tuple[Job[Any], Any]
"""What came of a job; an error of ours is raised for who waits."""


def deliver(replies: Iterable[Reply]) -> None:
    """Tell everybody what came of their jobs: an event loop is woken once for all of its own."""
    by_loop = defaultdict[asyncio.AbstractEventLoop | None, list[Reply]](list)
    for job, result in replies:
        by_loop[job.loop].append((job, result))
    for loop, mine in by_loop.items():
        if loop is None or loop is _running_loop():
            _settle(mine)
        else:
            with suppress(RuntimeError):  # it was closed, with all who waited in it
                loop.call_soon_threadsafe(_settle, mine)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _settle(replies: Iterable[Reply]) -> None:
    for job, result in replies:
        if job.future.done():
            continue
        if isinstance(result, WhetError):
            job.future.set_exception(result)
        else:
            job.future.set_result(result)
