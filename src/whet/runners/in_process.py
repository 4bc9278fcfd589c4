"""Agents in this process: async ones in a loop they share, sync ones in a thread each."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from anyio import CancelScope, get_cancelled_exc_class, move_on_after
from pydantic import JsonValue

from whet.errors import AttemptTimeout, WhetError
from whet.runners.agent import ReadAgent, awaited
from whet.runners.environment import guard_environment, restore_environment
from whet.runners.given import given_to
from whet.runners.running import Running, final_reward
from whet.runners.shared_loop import CANCEL_GRACE_S, Job, SharedLoop, Work
from whet.runners.threads import Threads

logger = logging.getLogger(__name__)

BLOCKED = "another attempt blocked the event loop they shared"


class Displaced(WhetError):
    """Another attempt blocked the loop that this one shared with it."""


class Workplace(Protocol):
    """Where agents run."""

    async def reward(self, now: Running, resources: Mapping[str, JsonValue]) -> float:
        """Run the agent on an attempt within its limit. Cancelled, it stops the agent.

        Raises:
            AttemptError: why there is no reward.
            Displaced: it came to nothing by no fault of its own.
        """
        ...

    async def close(self) -> None:
        """Stop what runs, and let go."""
        ...


class Room:
    """Where users' code runs in this process, apart from ours and, by attempt, from each other."""

    def __init__(self, concurrency: int) -> None:
        guard_environment()
        self._concurrency = concurrency
        self._loop = SharedLoop(concurrency)
        self._threads = Threads()

    async def run(self, now: Running, work: Work, limit_s: float) -> float:
        """Do some work for an attempt in the shared loop. Cancelled, it cancels the work.

        Raises:
            AttemptError: it raised, or took longer than its limit.
            Displaced: another attempt blocks the loop.
        """
        job = self._loop.start(now, work)
        try:
            with move_on_after(limit_s):
                return await job.reward()
        except get_cancelled_exc_class():
            with CancelScope(shield=True):
                await job.cancel()
            raise
        finally:
            now.has_ended = True
        if await job.cancel() and not job.is_displaced:
            raise AttemptTimeout(f"the attempt ran longer than {limit_s:g} s")
        raise await self._why_it_goes_on(job, limit_s)

    async def call(self, function: Callable[[], Any], *, is_async: bool) -> Any:
        """In the shared loop: the result of a call, made in a thread unless it gives a promise.

        Any: what users' functions return.
        """
        return await awaited(function() if is_async else await self._threads.run(function))

    async def close(self) -> None:
        """Cancel what runs, and let go."""
        self._threads.close()
        await self._loop.close()

    async def _why_it_goes_on(self, job: Job, limit_s: float) -> WhetError:
        answers = await job.home.answers(CANCEL_GRACE_S)
        if not answers and job.home is self._loop:
            self._replace_loop(job.home)
        if answers and not job.is_displaced:
            return AttemptTimeout(
                f"the attempt ran longer than {limit_s:g} s, and goes on though it was cancelled"
            )
        if job.home.blocked_by() is job.now:
            return AttemptTimeout(
                f"the attempt ran longer than {limit_s:g} s and blocks its event loop: await what "
                "takes long, or make the agent a plain function, which gets a thread"
            )
        return Displaced(BLOCKED)

    def _replace_loop(self, blocked: SharedLoop) -> None:
        blocker = blocked.blocked_by()
        logger.warning(
            "an agent blocks the event loop of all others, which get a new one attempt=%s",
            blocker.attempt.id if blocker else "unknown",
        )
        self._loop = SharedLoop(self._concurrency)
        for job in list(blocked.jobs):
            if job.now is not blocker:
                job.displace(Displaced(BLOCKED))
        blocked.retire()


class InProcess(Workplace):
    """In this process, many at once."""

    def __init__(self, agent: ReadAgent, room: Room) -> None:
        self._agent = agent
        self._room = room

    async def reward(self, now: Running, resources: Mapping[str, JsonValue]) -> float:
        work = partial(self._work, now, resources)
        return await self._room.run(now, work, now.attempt.rollout.timeout_s)

    async def close(self) -> None:
        pass  # the room is whoever's who gave it

    async def _work(self, now: Running, resources: Mapping[str, JsonValue]) -> float:
        entry = self._agent.entries[now.attempt.rollout.mode]
        given = given_to(entry.names, now.attempt, now.llm, resources)
        try:
            returned = await self._room.call(partial(entry.call, given), is_async=entry.is_async)
            return final_reward(returned, now.rewards)
        finally:
            restore_environment(now)
