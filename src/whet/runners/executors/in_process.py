"""Run agents in this process: async ones in one event loop they share, sync ones in a thread each.

The loop has a thread of its own. An agent that blocks it, stops it or cancels every task it finds
disturbs neither the leases of the runner nor, as far as possible, other attempts.
"""

import asyncio
import contextvars
import gc
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

from anyio import CancelScope, create_task_group, get_cancelled_exc_class, move_on_after
from pydantic import JsonValue

from whet.errors import AgentFailed, AttemptTimeout, WhetError
from whet.io.threads import call_in_loop
from whet.runners.agent import InspectedAgent, await_result, build_arguments
from whet.runners.context import (
    AttemptContext,
    active_attempt,
    as_attempt_error,
    resolve_reward,
)
from whet.runners.executors.certificates import defer_certificates
from whet.runners.executors.env_guard import (
    forget_changes,
    guard_environment,
    restore_environment,
)
from whet.runners.executors.executor import Evicted, Executor

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 2.0
"""Seconds that a canceled agent has to end."""

COLLECT_EVERY_S = 0.2
FULL_COLLECTION = 50
"""One in this many collections is of all generations."""

BLOCKED = "another attempt blocked the event loop they shared"

Work = Callable[[], Coroutine[Any, Any, float]]
"""Code of an attempt. Any: what a coroutine yields is asyncio's own."""


class InProcessExecutor(Executor):
    """Runs the agent in this process, many attempts at once."""

    def __init__(self, agent: InspectedAgent, user_code: "UserCodeRunner") -> None:
        self._agent = agent
        self._user_code = user_code

    async def run(self, context: AttemptContext, resources: Mapping[str, JsonValue]) -> float:
        work = partial(self._work, context, resources)
        return await self._user_code.run(context, work, context.attempt.rollout.timeout_s)

    async def close(self) -> None:
        pass  # the caller owns the runner

    async def _work(self, context: AttemptContext, resources: Mapping[str, JsonValue]) -> float:
        entrypoint = self._agent.entrypoints[context.attempt.rollout.mode]
        arguments = build_arguments(entrypoint.parameters, context.attempt, context.llm, resources)
        try:
            call = partial(entrypoint.call, arguments)
            returned = await self._user_code.call(call, is_async=entrypoint.is_async)
            return resolve_reward(returned, context.rewards)
        finally:
            restore_environment(context)


class UserCodeRunner:
    """Runs users' code, agents and hooks, isolated from the runner and other attempts."""

    def __init__(self, concurrency: int) -> None:
        logging.getLogger("asyncio").addFilter(_is_no_orphan)  # once, however often it is added
        self._concurrency = concurrency
        self._loop: _AgentLoop | None = None
        """Started by the first work: agents in other processes need none here."""
        self._threads = _AgentThreads()

    async def run(self, context: AttemptContext, work: Work, timeout_s: float) -> float:
        """Run the work in the agents' event loop; canceling this call cancels the work.

        Raises:
            AttemptError: the work raised, or took longer than its limit.
            Evicted: another attempt blocks the loop.
        """
        guard_environment()
        defer_certificates()
        if self._loop is None:
            forget_changes()
            self._loop = _AgentLoop(self._concurrency)
        job = self._loop.start(context, work)
        try:
            with move_on_after(timeout_s):
                return await job.result()
        except get_cancelled_exc_class():
            with CancelScope(shield=True):
                await job.cancel()
            raise
        finally:
            context.has_ended = True
        if await job.cancel() and not job.is_evicted:
            reason = context.timeout_reason and f": {context.timeout_reason}"
            raise AttemptTimeout(f"the attempt ran longer than {timeout_s:g} s{reason}")
        raise await self._explain_still_running(job, timeout_s)

    async def call(self, function: Callable[[], Any], *, is_async: bool) -> Any:
        """Call a function of the user inside `run` and await its result; a sync one gets a thread.

        Any: the results of users' functions.
        """
        return await await_result(function() if is_async else await self._threads.run(function))

    async def close(self) -> None:
        """Cancel running work, and end the loop and the threads."""
        self._threads.close()
        if self._loop is not None:
            await self._loop.close()

    async def _explain_still_running(self, job: "_Job", timeout_s: float) -> WhetError:
        is_responsive = await job.home.responds(CANCEL_GRACE_S)
        if not is_responsive and job.home is self._loop:
            self._replace_loop(job.home)
        if is_responsive and not job.is_evicted:
            return AttemptTimeout(
                f"the attempt ran longer than {timeout_s:g} s, and ignores its cancellation"
            )
        if job.home.find_running_attempt() is job.context:
            return AttemptTimeout(
                f"the attempt ran longer than {timeout_s:g} s and blocks its event loop: await "
                "what takes long, or make the agent a plain function, which gets a thread"
            )
        return Evicted(BLOCKED)

    def _replace_loop(self, blocked: "_AgentLoop") -> None:
        blocker = blocked.find_running_attempt()
        logger.warning(
            "an agent blocks the shared event loop; other attempts get a new one attempt=%s",
            blocker.attempt.id if blocker else "unknown",
        )
        self._loop = _AgentLoop(self._concurrency)
        for job in list(blocked.jobs):
            if job.context is not blocker:
                job.evict()
        blocked.retire()


def _is_no_orphan(record: logging.LogRecord) -> bool:
    """Filter out clients of an earlier run's loop that are collected, and so closed, in another."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed")


class _AgentThreads:
    """Threads for sync agents, reused when idle.

    Daemon threads, unlike those of a ThreadPoolExecutor: an agent that hangs must not keep the
    process alive. It keeps its thread, and others get a new one.
    """

    def __init__(self) -> None:
        self._calls = SimpleQueue[Callable[[], None] | None]()
        self._idle = threading.Semaphore(0)
        self._started = 0

    async def run(self, function: Callable[[], Any]) -> Any:
        """Call a function in a thread with a copy of this context. Raises AttemptError."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()

        def settle(result: Any, error: Exception | None) -> None:
            if done.done():
                return  # it was canceled meanwhile
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        def call() -> None:
            result, error = None, None
            try:
                result = context.run(function)
            except BaseException as raised:  # noqa: BLE001 - also SystemExit: it ends the attempt only
                error = as_attempt_error(raised)
            call_in_loop(loop, settle, result, error)

        self._calls.put(call)
        if not self._idle.acquire(blocking=False):
            self._started += 1
            threading.Thread(target=self._serve, name="whet-agent", daemon=True).start()
        return await done

    def close(self) -> None:
        """End the threads, each once its call has returned."""
        for _ in range(self._started):
            self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            self._idle.release()


class _Job:
    """The work of one attempt in the agents' event loop, as the runner's loop sees it."""

    def __init__(self, context: AttemptContext, home: "_AgentLoop") -> None:
        self.context = context
        self.home = home
        self.is_evicted = False
        self._runner_loop = asyncio.get_running_loop()
        # Errors are results here: one that is not awaited any more needs no log line.
        self._result: asyncio.Future[float | Exception] = self._runner_loop.create_future()
        self._task: asyncio.Task[None] | None = None
        self._is_canceled = False

    async def result(self) -> float:
        """Wait for the reward. Raises AttemptError or Evicted."""
        result = await asyncio.shield(self._result)
        if isinstance(result, Exception):
            raise result
        return result

    async def cancel(self) -> bool:
        """Cancel the work; returns whether it ended within the grace period."""
        self._request_cancel()
        await asyncio.wait([self._result], timeout=CANCEL_GRACE_S)
        return self._result.done()

    def evict(self) -> None:
        """Give the attempt up; it is canceled as soon as its loop runs again."""
        if not self._result.done():
            self.is_evicted = True
            self._result.set_result(Evicted(BLOCKED))
            self._request_cancel()

    def _request_cancel(self) -> None:
        self._is_canceled = True
        self.home.post(self._cancel)

    def _settle(self, result: float | Exception) -> None:
        if not self._result.done():
            self._result.set_result(result)

    # The methods below run in the agents' loop.

    async def run(self, work: Work) -> None:
        """Do the work, cancel tasks that the agent has left running, and report the result."""
        self._task = asyncio.current_task()
        try:
            if self._is_canceled:
                raise asyncio.CancelledError
            result = await work()
        except asyncio.CancelledError:
            reason = "was canceled" if self._is_canceled else "canceled itself"
            result = AgentFailed(f"the agent {reason}")
        except BaseException as raised:  # noqa: BLE001 - also SystemExit: it ends the attempt only
            result = as_attempt_error(raised)
        await self._cancel_leftovers()
        self.context.has_ended = True
        call_in_loop(self._runner_loop, self._settle, result)
        self.home.forget(self)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _cancel_leftovers(self) -> None:
        left = [t for t in self.context.tasks if t is not self._task and not t.done()]
        if not left:
            return
        logger.info(
            "tasks outlived their attempt and were canceled attempt=%s tasks=%d",
            self.context.attempt.id,
            len(left),
        )
        for task in left:
            task.cancel()
        with suppress(asyncio.CancelledError):  # canceled once more meanwhile
            await asyncio.wait(left, timeout=CANCEL_GRACE_S)


class _CollectionPause:
    """A context in which no thread collects garbage by itself.

    Clients that are never closed, as in most agents, close themselves when they are collected: in
    the running loop of the thread that happens to collect. If that is the gateway's, sockets that
    the agents' loop still polls are closed, and other calls never get their reply.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._was_enabled = gc.isenabled()
                gc.disable()

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._was_enabled:
                gc.enable()


_NO_COLLECTION = _CollectionPause()


class _AgentLoop:
    """An event loop in a thread of its own, shared by many attempts."""

    def __init__(self, threads: int) -> None:
        """`threads`: the size of the pool behind the agents' `asyncio.to_thread`."""
        self.jobs = set[_Job]()
        self._loop = _GuardedLoop()
        self._loop.set_task_factory(_create_task)
        self._loop.set_default_executor(
            ThreadPoolExecutor(threads, thread_name_prefix="whet-agents")
        )
        self._is_retired = self._is_drained = False
        self._draining: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._serve, name="whet-agents", daemon=True)
        self._thread.start()

    def start(self, context: AttemptContext, work: Work) -> _Job:
        """Start the work as a task in whose context, and its children's, the attempt is active."""
        job = _Job(context, self)
        self.jobs.add(job)
        task_context = contextvars.copy_context()
        task_context.run(active_attempt.set, context)
        task_context.run(call_in_loop, self._loop, self._begin, job, work)
        return job

    def post(self, callback: Callable[[], object]) -> None:
        """Call something in the loop, from any thread, outside the context of any attempt."""
        contextvars.Context().run(call_in_loop, self._loop, callback)

    def find_running_attempt(self) -> AttemptContext | None:
        """Return the attempt whose code the loop is running right now."""
        task = asyncio.current_task(self._loop)
        return task.owner if isinstance(task, _AgentTask) else None

    async def responds(self, within_s: float) -> bool:
        """Whether the loop runs a callback within this many seconds."""
        called = asyncio.Event()
        self.post(partial(call_in_loop, asyncio.get_running_loop(), called.set))
        with move_on_after(within_s):
            await called.wait()
        return called.is_set()

    def retire(self) -> None:
        """Close the loop once its jobs have ended; one that blocks it for ever keeps the thread."""
        self._is_retired = True
        self.post(self._drain_if_idle)

    async def close(self) -> None:
        """Cancel the jobs, wait for them, and close the loop."""
        async with create_task_group() as tasks:
            for job in list(self.jobs):
                tasks.start_soon(job.cancel)
        self.retire()
        await asyncio.to_thread(self._thread.join, CANCEL_GRACE_S)

    def forget(self, job: _Job) -> None:
        """Remove a job that has ended."""
        self.jobs.discard(job)
        if self._is_retired:
            self.post(self._drain_if_idle)

    # The methods below run in the loop's thread.

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._collect_garbage, 1)
        with _NO_COLLECTION:
            while not self._is_drained:
                try:
                    self._loop.run_forever()
                except BaseException as error:  # noqa: BLE001 - SystemExit of a task that was left
                    logger.warning("an agent's task ended the loop; it is restarted: %r", error)
            self._loop.close()

    def _collect_garbage(self, count: int) -> None:
        """Collect garbage here, and in no other thread: see `_CollectionPause`."""
        gc.collect(2 if count % FULL_COLLECTION == 0 else 1)
        self._loop.call_later(COLLECT_EVERY_S, self._collect_garbage, count + 1)

    def _begin(self, job: _Job, work: Work) -> None:
        self._loop.create_task(job.run(work))

    def _drain_if_idle(self) -> None:
        if not self.jobs and self._draining is None:
            self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        gc.collect()  # clients that were never closed close themselves now, while they have a loop
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=CANCEL_GRACE_S)
        await self._loop.shutdown_asyncgens()
        self._is_drained = True
        self._loop.stop()


class _GuardedLoop(asyncio.SelectorEventLoop):
    """An event loop that agents cannot end: those calls raise in them."""

    def stop(self) -> None:
        _refuse_in_agent("stops")
        super().stop()

    def close(self) -> None:
        _refuse_in_agent("closes")
        super().close()

    async def shutdown_default_executor(self, *args: Any) -> None:
        _refuse_in_agent("shuts down the threads of")
        await super().shutdown_default_executor(*args)


def _refuse_in_agent(action: str) -> None:
    if active_attempt.get() is not None:
        raise AgentFailed(f"the agent {action} the event loop, which it shares with other attempts")


class _AgentTask(asyncio.Task[Any]):
    """A task that other attempts cannot cancel, such as by canceling `asyncio.all_tasks()`."""

    owner: AttemptContext | None = None
    """None: the task belongs to the loop itself."""

    def cancel(self, msg: Any | None = None) -> bool:
        caller = active_attempt.get()
        if caller is not None and caller is not self.owner:
            logger.warning("an agent cancels a foreign task attempt=%s", caller.attempt.id)
            return False
        return super().cancel(msg)


def _create_task(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> _AgentTask:
    # Any: the options of a Task, which grow with the versions of Python.
    context: contextvars.Context | None = options.get("context")
    owner = active_attempt.get() if context is None else context.get(active_attempt)
    task = _AgentTask(coro, loop=loop, **options)
    task.owner = owner
    if owner is not None:
        owner.tasks.add(task)
    return task
