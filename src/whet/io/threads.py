"""Event loops and threads: run async work from sync code, and call into loops from anywhere."""

import asyncio
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from types import FrameType
from typing import Any, TypeVar, TypeVarTuple, Unpack, cast

import anyio
import anyio.to_thread
from anyio.from_thread import start_blocking_portal

from whet.io.process import REPEAT_S

T = TypeVar("T")
Args = TypeVarTuple("Args")

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter lock while others wait for it. An engine needs the
lock between any two passes, and Python's 5 ms are longer than a pass."""

_short_turns: list[float] = []
"""The switch interval before each open block of `shorten_thread_turns`."""
_short_turns_lock = threading.Lock()

Resolution = tuple[asyncio.Future[Any], Any]
"""A future and its result; an exception is raised for the task that awaits it."""


@contextmanager
def shorten_thread_turns() -> Generator[None]:
    """Let the threads of this process take turns at the interpreter lock quickly."""
    with _short_turns_lock:
        _short_turns.append(sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        with _short_turns_lock:
            # Blocks may end in another order than they began: the last one restores the interval.
            first_s = _short_turns[0]
            _short_turns.pop()
            if not _short_turns:
                sys.setswitchinterval(first_s)


def run_async(work: Callable[[Unpack[Args]], Awaitable[T]], *args: *Args) -> T:
    """Run async work to its end. An error is raised without the group of its task group.

    Inside a running event loop, as in a notebook, the work gets a thread with a loop of its own.
    """
    with unwrap_group():
        if (cancellation := _cancellation.get()) is not None:
            return anyio.run(cancellation.run, work, *args)
        if not _is_in_loop():
            return anyio.run(_run_interruptible, work, *args)
        with start_blocking_portal() as portal:
            future = portal.start_task_soon(work, *args)
            try:
                with _interruptible_wait():
                    return future.result()
            except KeyboardInterrupt:
                future.cancel()
                raise


async def run_in_thread(work: Callable[[], T]) -> T:
    """Run sync work in a thread. A cancellation of the caller cancels what it runs by `run_async`.

    The caller waits for the end of the work also then.
    """
    cancellation = _Cancellation()
    context = copy_context()
    context.run(_cancellation.set, cancellation)
    loop = asyncio.get_running_loop()
    running = loop.create_task(anyio.to_thread.run_sync(work), context=context)
    try:
        await asyncio.wait([running])
    except asyncio.CancelledError:
        cancellation.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # seen: the cancellation is raised
        raise
    return running.result()


class _Cancellation:
    """The cancellation of a caller, for the work that its thread runs in an event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_canceled = False
        self._cancel_work: Callable[[], object] | None = None

    async def run(self, work: Callable[[Unpack[Args]], Awaitable[T]], *args: *Args) -> T:
        """Run work that is canceled with the caller."""
        task = asyncio.current_task()
        assert task is not None

        def cancel() -> None:
            call_in_loop(task.get_loop(), task.cancel)

        with self._lock:
            if self._is_canceled:
                raise asyncio.CancelledError
            self._cancel_work = cancel
        _cancellation.set(None)  # not for what the work itself runs
        try:
            return await work(*args)
        finally:
            with self._lock:
                self._cancel_work = None

    def cancel(self) -> None:
        """Cancel the work, or what is to be run next."""
        with self._lock:
            self._is_canceled = True
            if self._cancel_work is not None:
                self._cancel_work()


_cancellation: ContextVar[_Cancellation | None] = ContextVar("cancellation", default=None)
"""That of the caller whose thread this is."""


class _MergedInterrupts:
    """Handler of Ctrl-C that passes on the first of several at once."""

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self._handler = handler
        self._last_s = float("-inf")

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if (now_s := time.monotonic()) - self._last_s > REPEAT_S:
            self._last_s = now_s
            self._handler(number, frame)


async def _run_interruptible(work: Callable[[Unpack[Args]], Awaitable[T]], *args: *Args) -> T:
    with _merge_interrupts():
        return await work(*args)


@contextmanager
def _merge_interrupts() -> Generator[None]:
    """Drop an interrupt that repeats the one before it, within an event loop.

    asyncio cancels the work at the first one and raises at the second wherever the loop is, such as
    in the middle of that cancellation: its tasks then never end.
    """
    if (before := _find_runner_handler()) is None:
        yield
        return
    interrupt = _MergedInterrupts(before)
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:  # not one that the work has set
            signal.signal(signal.SIGINT, before)


@contextmanager
def _interruptible_wait() -> Generator[None]:
    """Let Ctrl-C raise in a block that waits without giving control to its event loop.

    The handler of `asyncio.run` only requests that its task be canceled, which is not noticed then.
    """
    if (before := _find_runner_handler()) is None:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _find_runner_handler() -> Callable[[int, FrameType | None], object] | None:
    """The handler of Ctrl-C if it is asyncio's or merges for it, and this is the main thread."""
    handler = signal.getsignal(signal.SIGINT)
    method = getattr(handler, "func", None)  # of a partial
    is_main = threading.current_thread() is threading.main_thread()
    if (
        is_main
        and callable(handler)
        and (
            isinstance(handler, _MergedInterrupts)
            or isinstance(getattr(method, "__self__", None), asyncio.Runner)
        )
    ):
        return handler
    return None


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextmanager
def unwrap_group() -> Generator[None]:
    """Raise the first error of a task group by itself, with its own cause.

    Not from the group, which would repeat the error's traceback.
    """
    try:
        yield
    except ExceptionGroup as group:
        error = _find_first(group)
        raise error from error.__cause__


def _find_first(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first error of a group that is not a group itself."""
    error = group.exceptions[0]
    if isinstance(error, ExceptionGroup):
        return _find_first(cast(ExceptionGroup[Exception], error))
    return error


def call_in_loop(
    loop: asyncio.AbstractEventLoop,
    callback: Callable[[Unpack[Args]], object],
    *args: *Args,
) -> bool:
    """Schedule a callback in an event loop, from any thread.

    Returns False if the loop is closed: its tasks are gone, and nothing waits for the callback.
    """
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:  # asyncio's answer for a closed loop
        return False
    return True


def resolve_all(resolutions: Iterable[Resolution]) -> None:
    """Resolve futures of any event loops, from any thread.

    Each loop is woken once for all of its futures: waking a loop costs more than a future.
    """
    by_loop = defaultdict[asyncio.AbstractEventLoop, list[Resolution]](list)
    for future, result in resolutions:
        by_loop[future.get_loop()].append((future, result))
    for loop, mine in by_loop.items():
        call_in_loop(loop, _resolve, mine)


class LoopEvent:
    """An event of the running event loop, which `set_all` sets from any thread."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self.clear = self._event.clear
        self.set = self._event.set
        self.wait = self._event.wait


def set_all(events: Iterable[LoopEvent]) -> None:
    """Set events of any event loops, from any thread; each loop is woken once for all its own."""
    by_loop = defaultdict[asyncio.AbstractEventLoop, list[LoopEvent]](list)
    for event in events:
        by_loop[event.loop].append(event)
    for loop, mine in by_loop.items():
        call_in_loop(loop, _set, mine)


def _set(events: Iterable[LoopEvent]) -> None:
    for event in events:
        event.set()


def _resolve(resolutions: Iterable[Resolution]) -> None:
    for future, result in resolutions:
        if future.done():  # canceled meanwhile
            continue
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
