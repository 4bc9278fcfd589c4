"""Threads for sync agents: one each, reused once it is free, and none that is waited for."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from whet.runners.running import failure_of

Item = Callable[[], None] | None


class Threads:
    """As many as work at once; one whose agent hangs is left alone, and keeps no process."""

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[Item]] = []
        self._lock = threading.Lock()
        self._is_closed = False

    async def run(self, call: Callable[[], Any]) -> Any:
        """The result of a call in a thread that knows this context. Any: what it returns.

        Raises:
            AttemptError: it raised anything.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()

        def settle(result: Any, error: Exception | None) -> None:
            if not done.done():
                if error is None:
                    done.set_result(result)
                else:
                    done.set_exception(error)

        def work() -> None:
            result, error = None, None
            try:
                result = context.run(call)
            except BaseException as raised:  # noqa: BLE001 - also SystemExit: it is the agent's only
                error = failure_of(raised)
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, error)

        self._take().put(work)
        return await done

    def close(self) -> None:
        """Have those that are free end, and the others once they are."""
        with self._lock:
            self._is_closed = True
            for queue in self._idle:
                queue.put(None)

    def _take(self) -> SimpleQueue[Item]:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        queue = SimpleQueue[Item]()
        threading.Thread(target=self._work, args=(queue,), name="whet-agent", daemon=True).start()
        return queue

    def _work(self, queue: SimpleQueue[Item]) -> None:
        while (work := queue.get()) is not None:
            work()
            with self._lock:
                if self._is_closed:
                    return
                self._idle.append(queue)
