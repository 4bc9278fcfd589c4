"""The event loop that agents share, in a thread of its own.

Not the runner's: an agent that blocks it, stops it or cancels all it finds disturbs neither the
runner's leases nor, as far as that can be, other attempts.
"""

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from anyio import create_task_group

from whet.errors import AgentFailed
from whet.runners.mailbox import Mailbox
from whet.runners.running import Running, failure_of, running

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 2.0
"""How long an agent that is cancelled is waited for."""

Work = Callable[[], Coroutine[Any, Any, float]]
"""Any: what a coroutine yields is asyncio's own."""


class Job:
    """An agent at work in a shared loop, as its runner sees it."""

    def __init__(self, now: Running, home: "SharedLoop") -> None:
        self.now = now
        self.home = home
        self._ended: asyncio.Future[float | Exception] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self.is_displaced = False
        """It was given up because of another."""

    async def reward(self) -> float:
        """What the agent earned. Raises AttemptError."""
        earned = await asyncio.shield(self._ended)
        if isinstance(earned, Exception):
            raise earned
        return earned

    async def cancel(self) -> bool:
        """Have the agent cancelled; whether it had ended within the grace."""
        self._is_cancelled = True
        self.home.inbox.post(self._cancel)
        await asyncio.wait([self._ended], timeout=CANCEL_GRACE_S)
        return self._ended.done()

    def displace(self, error: Exception) -> None:
        """Give it up; it is cancelled as soon as its loop turns again."""
        if not self._ended.done():
            self.is_displaced = self._is_cancelled = True
            self._ended.set_result(error)
            self.home.inbox.post(self._cancel)

    # In the shared loop from here on.

    async def run(self, work: Work) -> None:
        """Do the work, end what the agent has left running, and report."""
        self._task = asyncio.current_task()
        try:
            if self._is_cancelled:
                raise asyncio.CancelledError
            earned = await work()
        except asyncio.CancelledError:
            why = "was cancelled" if self._is_cancelled else "cancelled itself"
            earned = AgentFailed(f"the agent {why}")
        except BaseException as raised:  # noqa: BLE001 - also SystemExit: it is the agent's only
            earned = failure_of(raised)
        await self._end_leftovers()
        self.now.has_ended = True
        self.home.jobs.discard(self)
        self.home.outbox.post(partial(self._settle, earned))

    def _settle(self, earned: float | Exception) -> None:
        if not self._ended.done():
            self._ended.set_result(earned)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _end_leftovers(self) -> None:
        left = [t for t in self.now.tasks if t is not self._task and not t.done()]
        if not left:
            return
        logger.warning(
            "tasks outlived their attempt and were cancelled attempt=%s tasks=%d",
            self.now.attempt.id,
            len(left),
        )
        for task in left:
            task.cancel()
        try:
            await asyncio.wait(left, timeout=CANCEL_GRACE_S)
        except asyncio.CancelledError:
            logger.debug("cancelled once more attempt=%s", self.now.attempt.id)


class SharedLoop:
    """An event loop in a thread, for many agents."""

    def __init__(self, threads: int) -> None:
        """So many threads are there for what agents give to `asyncio.to_thread`."""
        self.jobs = set[Job]()
        self._loop = _Loop()
        self.inbox = Mailbox(self._loop)
        self.outbox = Mailbox(asyncio.get_running_loop())
        self._loop.set_task_factory(_new_task)
        self._loop.set_default_executor(
            ThreadPoolExecutor(threads, thread_name_prefix="whet-agents")
        )
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._work, name="whet-agents", daemon=True)
        self._thread.start()

    def start(self, now: Running, work: Work) -> Job:
        """Begin the work as a task; everything inside it knows its attempt."""
        job = Job(now, self)
        self.jobs.add(job)
        context = contextvars.copy_context()
        context.run(running.set, now)
        self.inbox.post(partial(self._begin, job, work, context))
        return job

    def blocked_by(self) -> Running | None:
        """Whose code is running in it right now."""
        task = asyncio.current_task(self._loop)
        return task.owner if isinstance(task, _AgentTask) else None

    async def answers(self, within_s: float) -> bool:
        """Whether it still turns."""
        answered = asyncio.Event()
        self.inbox.post(partial(self.outbox.post, answered.set))
        try:
            async with asyncio.timeout(within_s):
                await answered.wait()
        except TimeoutError:
            return False
        return True

    def retire(self) -> None:
        """Close it once nothing runs there; an agent that blocks it for ever keeps its thread."""
        self.inbox.post(self._end.set)

    async def close(self) -> None:
        """Cancel what runs, wait for it, and close."""
        async with create_task_group() as ending:
            for job in list(self.jobs):
                ending.start_soon(job.cancel)
        self.retire()
        await asyncio.to_thread(self._thread.join, CANCEL_GRACE_S)

    def _begin(self, job: Job, work: Work, context: contextvars.Context) -> None:
        self._loop.create_task(job.run(work), context=context)

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        keeper = self._loop.create_task(self._until_retired())
        assert isinstance(keeper, _AgentTask)
        keeper.is_kept = True
        while not keeper.done() and not self._loop.is_closed():
            try:
                self._loop.run_until_complete(keeper)
            except BaseException as error:  # noqa: BLE001 - SystemExit of a task that an agent left
                logger.warning("an agent's task ended the loop, which goes on error=%r", error)
        self._loop.close()

    async def _until_retired(self) -> None:
        await self._end.wait()
        while left := asyncio.all_tasks() - {asyncio.current_task()}:
            if not self.jobs:
                for task in left:
                    task.cancel()
            await asyncio.wait(left, timeout=CANCEL_GRACE_S)
            if not self.jobs:
                break
        await self._loop.shutdown_asyncgens()


class _Loop(asyncio.SelectorEventLoop):
    """Ends by its owner only: in an agent whatever would end it raises."""

    def stop(self) -> None:
        _refuse("stops")
        super().stop()

    def close(self) -> None:
        _refuse("closes")
        super().close()

    async def shutdown_default_executor(self, *args: Any) -> None:
        _refuse("shuts down the threads of")
        await super().shutdown_default_executor(*args)


def _refuse(what: str) -> None:
    if running.get() is not None:
        raise AgentFailed(f"the agent {what} the event loop, which it shares with other attempts")


class _AgentTask(asyncio.Task[Any]):
    """A task of an agent: other attempts cannot cancel it."""

    owner: Running | None = None
    is_kept = False
    """It is the loop's own."""

    def cancel(self, msg: Any | None = None) -> bool:
        asks = running.get()
        foreign = self.is_kept or (self.owner is not None and self.owner is not asks)
        if asks is not None and foreign:
            logger.warning("an agent cancels what is not its own attempt=%s", asks.attempt.id)
            return False
        return super().cancel(msg)


def _new_task(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> _AgentTask:
    # Any: what a Task takes, which is more in later versions of Python.
    context: contextvars.Context | None = options.get("context")
    owner = running.get() if context is None else context.get(running)
    task = _AgentTask(coro, loop=loop, **options)
    task.owner = owner
    if owner is not None:
        owner.tasks.add(task)
    return task
