"""Runs agents in this process, many attempts at once."""

import logging
import math
import os
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio
from anyio import CapacityLimiter, Semaphore, create_task_group, move_on_after, to_thread

from whet.config import RunnerConfig
from whet.errors import AgentFailed, AttemptError, AttemptTimeout, BadReward, LeaseLost, boundary
from whet.protocols import AttemptLog, RolloutQueue
from whet.runners.agent import Agent, awaited, check_agent, emitted, final_reward, is_async
from whet.types import Attempt, Endpoint, Failure, FailureKind, Outcome, Reward

logger = logging.getLogger(__name__)

LEASE_S = 60.0
CLAIM_WAIT_S = 30.0

KINDS: dict[type[AttemptError], FailureKind] = {
    AgentFailed: FailureKind.AGENT,
    AttemptTimeout: FailureKind.TIMEOUT,
    BadReward: FailureKind.REWARD,
}


class LocalRunner:
    """Claims rollouts and runs the agent on each.

    Async agents share this event loop, sync ones get a thread each. A failure is recorded on the
    attempt and the next one is claimed: a bad rollout is data, not a crash.
    """

    def __init__(
        self,
        agent: Agent,
        config: RunnerConfig,
        *,
        queue: RolloutQueue,
        log: AttemptLog,
        endpoint: Callable[[Attempt], Endpoint],
        on_outcome: Callable[[Attempt, Outcome], None] = lambda attempt, outcome: None,
    ) -> None:
        check_agent(agent)
        self._agent = agent
        self._queue = queue
        self._log = log
        self._endpoint = endpoint
        self._on_outcome = on_outcome
        self._slots = Semaphore(config.concurrency)
        self._threads = CapacityLimiter(config.concurrency)
        self._worker = f"{os.getpid()}-{secrets.token_hex(4)}"

    async def run(self) -> None:
        """Work until cancelled."""
        async with create_task_group() as tasks:
            while True:
                await self._slots.acquire()
                attempt = await self._queue.claim(
                    self._worker, lease_s=LEASE_S, wait_s=CLAIM_WAIT_S
                )
                if attempt is None:
                    self._slots.release()
                else:
                    tasks.start_soon(self._run_and_release, attempt)

    async def _run_and_release(self, attempt: Attempt) -> None:
        try:
            await self._run_one(attempt)
        finally:
            self._slots.release()

    async def _run_one(self, attempt: Attempt) -> None:
        rewards: list[Reward] = []
        async with self._lease_kept(attempt):
            outcome = await self._outcome(attempt, rewards)
        try:
            for reward in rewards:
                await self._log.emit(attempt.id, reward)
            await self._queue.finish(attempt.id, outcome)
        except LeaseLost:
            logger.warning("attempt reported too late attempt=%s", attempt.id)
            return
        self._on_outcome(attempt, outcome)

    async def _outcome(self, attempt: Attempt, rewards: list[Reward]) -> Outcome:
        try:
            return Outcome(reward=await self._reward(attempt, rewards))
        except AttemptError as error:
            logger.warning("attempt failed attempt=%s reason=%s", attempt.id, error)
            return Outcome(failure=Failure(kind=KINDS[type(error)], message=str(error)))

    async def _reward(self, attempt: Attempt, rewards: list[Reward]) -> float:
        emitted.set(rewards)
        limit = attempt.rollout.timeout_s
        with move_on_after(limit):
            with boundary(AgentFailed, "the agent raised"):
                returned = await self._call_agent(attempt)
            return final_reward(returned, rewards)
        raise AttemptTimeout(f"the attempt ran longer than {limit:g} s")

    async def _call_agent(self, attempt: Attempt) -> object:
        task, llm = attempt.rollout.task, self._endpoint(attempt)
        if is_async(self._agent):
            return await awaited(self._agent(task, llm))
        result = await to_thread.run_sync(
            self._agent, task, llm, limiter=self._threads, abandon_on_cancel=True
        )
        return await awaited(result)

    @asynccontextmanager
    async def _lease_kept(self, attempt: Attempt) -> AsyncGenerator[None]:
        async with create_task_group() as tasks:
            tasks.start_soon(self._keep_lease, attempt)
            yield
            tasks.cancel_scope.cancel()

    async def _keep_lease(self, attempt: Attempt) -> None:
        while True:
            await anyio.sleep(LEASE_S / 3)
            try:
                await self._queue.heartbeat(attempt.id, lease_s=LEASE_S)
            except LeaseLost:
                await anyio.sleep(math.inf)  # Finishing will find out too, and say so.
