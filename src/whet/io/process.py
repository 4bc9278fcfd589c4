"""Long-running processes: signals, supervisors, messages, restarts with backoff, free ports."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress

import anyio
from anyio import CancelScope, create_task_group
from anyio.abc import TaskStatus

SUPERVISED = "WHET_SUPERVISED"
"""Variable that a supervisor sets; its death closes our stdin."""
REPEAT_S = 1.0
"""Seconds in which a second signal counts as part of the first: `timeout` and many supervisors
signal a process and, right after, its group."""


class Stop:
    """A request to stop the process."""

    def __init__(self) -> None:
        self.requested = anyio.Event()
        self._scopes = set[CancelScope]()

    @contextmanager
    def cancel_on_request(self) -> Generator[None]:
        """Cancel the block, without an error, once the stop is requested."""
        with CancelScope() as scope:
            self._scopes.add(scope)
            if self.requested.is_set():
                scope.cancel()
            try:
                yield
            finally:
                self._scopes.discard(scope)

    def request(self) -> None:
        """Request the stop."""
        self.requested.set()
        for scope in self._scopes:
            scope.cancel()


@asynccontextmanager
async def handle_stop_signals() -> AsyncGenerator[Stop]:
    """Request a stop on Ctrl-C and SIGTERM; on the second signal the process exits at once."""
    stop = Stop()

    async def listen(*, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            first_s = float("-inf")
            async for _ in signals:
                if stop.requested.is_set() and time.monotonic() - first_s > REPEAT_S:
                    sys.stdout.flush()
                    os._exit(130)
                if not stop.requested.is_set():
                    first_s = time.monotonic()
                    stop.request()

    async with create_task_group() as tasks:
        await tasks.start(listen)
        yield stop
        tasks.cancel_scope.cancel()


@contextmanager
def treat_sigterm_as_interrupt() -> Generator[None]:
    """Treat SIGTERM as Ctrl-C within the block.

    Only the main thread may change signal handlers; in another one nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    last_s = float("-inf")

    def interrupt(number: int, frame: object) -> None:
        nonlocal last_s
        if (now_s := time.monotonic()) - last_s > REPEAT_S:
            last_s = now_s
            _interrupt()

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)  # None: not of Python


def _interrupt() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)  # an event loop may have a handler of its own


def follow_supervisor() -> None:
    """End this process when the supervisor that started it is gone, even if it was killed."""
    if os.environ.pop(SUPERVISED, None) is None:
        return

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="whet-supervised", daemon=True).start()


class MessageWriter:
    """Writes JSON lines to the process that started this one, from any thread.

    It takes this process's stdout for itself: what others print goes to stderr.
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._writing = threading.Lock()

    def send(self, message: Mapping[str, object]) -> None:
        """Write one line; ignored if the reader has closed the pipe."""
        with self._writing, suppress(BrokenPipeError):
            self._out.write(json.dumps(message) + "\n")
            self._out.flush()


LONGEST_PAUSE_S = 30.0
MAX_DEATHS = 6
"""Deaths in a row after which a process is not restarted again."""


class RestartBackoff:
    """Pauses between the restarts of a process that dies, and when to give up."""

    def __init__(self, *, first_pause_s: float = 0.5, healthy_s: float = 60.0) -> None:
        """`healthy_s`: a process that lived longer resets the count of deaths."""
        self.deaths = 0
        """In a row, each after less than `healthy_s`."""
        self._first_pause_s = first_pause_s
        self._healthy_s = healthy_s

    def count_death(self, lived_s: float) -> float | None:
        """Count a death; returns the pause in seconds before the restart, or None to give up."""
        self.deaths = 1 if lived_s > self._healthy_s else self.deaths + 1
        if self.deaths >= MAX_DEATHS:
            return None
        return min(self._first_pause_s * 2 ** (self.deaths - 1), LONGEST_PAUSE_S)


def find_free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
