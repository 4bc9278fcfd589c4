"""How a process that works until it is told to stop is told."""

import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar, TypeVarTuple, Unpack, cast

import anyio
from anyio import CancelScope, create_task_group
from anyio.abc import TaskStatus

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

SUPERVISED = "WHET_SUPERVISED"
"""Set by a supervisor, whose death closes our stdin."""


def run_async(work: Callable[[Unpack[Arguments]], Awaitable[T]], *arguments: *Arguments) -> T:
    """Run async work to its end. An error comes out as it is, whatever task it came from."""
    try:
        return anyio.run(work, *arguments)
    except ExceptionGroup as group:
        raise first_of(group) from group


def first_of(group: ExceptionGroup[Exception]) -> Exception:
    """The first error of a group that is none."""
    error = group.exceptions[0]
    if isinstance(error, ExceptionGroup):
        return first_of(cast(ExceptionGroup[Exception], error))
    return error


class Stop:
    """Whether the process was told to stop."""

    def __init__(self) -> None:
        self.asked = anyio.Event()
        self._scopes = set[CancelScope]()

    @contextmanager
    def cancels(self) -> Generator[None]:
        """The block is cancelled, and left quietly, once the process is told to stop."""
        with CancelScope() as scope:
            self._scopes.add(scope)
            if self.asked.is_set():
                scope.cancel()
            try:
                yield
            finally:
                self._scopes.discard(scope)

    def ask(self) -> None:
        """Stop."""
        self.asked.set()
        for scope in self._scopes:
            scope.cancel()


@asynccontextmanager
async def stoppable() -> AsyncGenerator[Stop]:
    """Ctrl-C and SIGTERM ask the block to stop; asked twice, the process ends at once."""
    stop = Stop()

    async def listen(*, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                if stop.asked.is_set():
                    sys.stdout.flush()
                    os._exit(130)
                stop.ask()

    async with create_task_group() as tasks:
        await tasks.start(listen)
        yield stop
        tasks.cancel_scope.cancel()


def interrupt_on_sigterm() -> None:
    """SIGTERM does what Ctrl-C does, which a process started in the background may ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))


def follow_supervisor() -> None:
    """End when the supervisor that started this process is gone, however it went."""
    if os.environ.pop(SUPERVISED, None) is None:
        return

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="whet-supervised", daemon=True).start()
