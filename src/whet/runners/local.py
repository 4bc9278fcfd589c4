"""Runs agents in this process, many attempts at once."""

import logging
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import anyio
from anyio import (
    CancelScope,
    CapacityLimiter,
    Event,
    Semaphore,
    create_task_group,
    move_on_after,
    to_thread,
)
from anyio.abc import TaskGroup
from pydantic import JsonValue

from whet.config import RunnerConfig
from whet.errors import (
    AgentFailed,
    AttemptError,
    AttemptTimeout,
    BadReward,
    LeaseLost,
    NotFound,
    boundary,
)
from whet.protocols import AttemptLog, AttemptWatch, Directory, Resources, RolloutQueue
from whet.runners.agent import (
    Agent,
    asked_for,
    awaited,
    check_agent,
    emitted,
    final_reward,
    is_async,
)
from whet.runners.gateways import Connection, Gateways
from whet.types import Attempt, AttemptId, Endpoint, Failure, FailureKind, Outcome, Reward

logger = logging.getLogger(__name__)

CLAIM_WAIT_S = 30.0
CLAIMS_AT_ONCE = 8
"""A store that is elsewhere takes its time to answer, and does claims of one moment together."""

KINDS: dict[type[AttemptError], FailureKind] = {
    AgentFailed: FailureKind.AGENT,
    AttemptTimeout: FailureKind.TIMEOUT,
    BadReward: FailureKind.REWARD,
}

HANDED_BACK = Outcome(
    failure=Failure(kind=FailureKind.WORKER_LEFT, message="its worker left and handed it back")
)

NO_GATEWAY = Outcome(
    failure=Failure(kind=FailureKind.MODEL_LOST, message="no gateway answered when it began")
)


class Work(RolloutQueue, AttemptWatch, AttemptLog, Resources, Directory, Protocol):
    """What a runner needs of a store."""


class LocalRunner:
    """Claims rollouts and runs the agent on each.

    Async agents share this event loop, sync ones get a thread each. A failure is recorded on the
    attempt and the next one is claimed: a bad rollout is data, not a crash. An attempt that was
    ended from elsewhere is stopped at once: an async agent is cancelled, a sync one is left alone
    with a model that no longer answers it.
    """

    def __init__(
        self,
        agent: Agent,
        config: RunnerConfig,
        *,
        store: Work,
        gateways: Gateways,
        name: str | None = None,
        on_outcome: Callable[[Attempt, Outcome], None] = lambda attempt, outcome: None,
    ) -> None:
        """`name` is the worker's in the store; one that had it before is taken to be dead."""
        check_agent(agent)
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._is_renamed = name is not None
        self._agent = agent
        self._wants_resources = bool(asked_for(agent, {}))
        self._known: dict[tuple[str, int], JsonValue] = {}
        """Values of resources, which never change."""
        self._concurrency = config.concurrency
        self._lease_s = config.lease_s
        self._store = store
        self._gateways = gateways
        self._on_outcome = on_outcome
        self._slots = Semaphore(config.concurrency)
        self._threads = CapacityLimiter(config.concurrency)
        self._running = set[AttemptId]()
        self._claiming = CancelScope()
        self._grace_s = 0.0
        self._hand_back = Event()

    async def run(self) -> None:
        """Work until cancelled, or until told to leave."""
        if self._is_renamed:
            await self._return_strays()
        async with create_task_group() as attempts:
            with self._claiming:
                async with create_task_group() as claims:
                    for _ in range(min(CLAIMS_AT_ONCE, self._concurrency)):
                        claims.start_soon(self._claim, attempts)
            with move_on_after(self._grace_s):
                while self._running:
                    await self._slots.acquire()
            self._hand_back.set()
        await self._return_strays()

    async def _claim(self, attempts: TaskGroup) -> None:
        while True:
            await self._slots.acquire()
            await self._gateways.ready()
            attempt = await self._store.claim(self.name, lease_s=self._lease_s, wait_s=CLAIM_WAIT_S)
            if attempt is None:
                self._slots.release()
            else:
                self._running.add(attempt.id)
                attempts.start_soon(self._run_and_release, attempt)

    def leave(self, grace_s: float) -> None:
        """Claim nothing more, let what runs go on so long, and hand back what is left then."""
        logger.info("runner leaves name=%s running=%d", self.name, len(self._running))
        self._grace_s = grace_s
        self._claiming.cancel()

    @property
    def running(self) -> int:
        """Attempts at work here."""
        return len(self._running)

    async def _return_strays(self) -> None:
        """Hand back what the store holds to be at work here and is not.

        A claim whose answer never arrived, or what ran under this name when it was killed.
        """
        for worker in await self._store.workers():
            if worker.name == self.name:
                for attempt in set(worker.running) - self._running:
                    with suppress(LeaseLost):
                        await self._store.finish(attempt, HANDED_BACK)

    async def _run_and_release(self, attempt: Attempt) -> None:
        try:
            await self._run_one(attempt)
        finally:
            self._running.discard(attempt.id)
            self._slots.release()

    async def _run_one(self, attempt: Attempt) -> None:
        rewards: list[Reward] = []
        outcome = HANDED_BACK
        async with create_task_group() as tasks:
            tasks.start_soon(self._keep_lease, attempt, tasks.cancel_scope)
            tasks.start_soon(self._stop_when_ended, attempt, tasks.cancel_scope)
            tasks.start_soon(self._stop_when_leaving, tasks.cancel_scope)
            outcome = await self._outcome(attempt, rewards)
            tasks.cancel_scope.cancel()
        if outcome is HANDED_BACK and not self._hand_back.is_set():
            logger.warning("attempt was ended from elsewhere attempt=%s", attempt.id)
            return
        try:
            for reward in rewards:
                await self._store.emit(attempt.id, reward)
            await self._store.finish(attempt.id, outcome)
        except LeaseLost:
            logger.warning("attempt reported too late attempt=%s", attempt.id)
            return
        self._on_outcome(attempt, outcome)

    async def _outcome(self, attempt: Attempt, rewards: list[Reward]) -> Outcome:
        connection = self._gateways.connect(attempt)
        if connection is None:  # lost while this was being claimed
            return NO_GATEWAY
        try:
            return Outcome(reward=await self._reward(attempt, connection.endpoint, rewards))
        except AttemptError as error:
            kind = await self._kind(error, connection)
            logger.warning(
                "attempt failed attempt=%s kind=%s reason=%s", attempt.id, kind.value, error
            )
            return Outcome(failure=Failure(kind=kind, message=str(error)))

    async def _kind(self, error: AttemptError, connection: Connection) -> FailureKind:
        # An agent without its model fails in any way, late or soon.
        if not isinstance(error, BadReward) and await connection.was_lost():
            return FailureKind.MODEL_LOST
        return KINDS[type(error)]

    async def _reward(self, attempt: Attempt, llm: Endpoint, rewards: list[Reward]) -> float:
        emitted.set(rewards)
        limit = attempt.rollout.timeout_s
        with move_on_after(limit):
            with boundary(AgentFailed, "the agent raised"):
                returned = await self._call_agent(attempt, llm)
            return final_reward(returned, rewards)
        raise AttemptTimeout(f"the attempt ran longer than {limit:g} s")

    async def _call_agent(self, attempt: Attempt, llm: Endpoint) -> object:
        given = await self._resources(attempt) if self._wants_resources else {}
        call = partial(self._agent, attempt.rollout.task, llm, **given)
        if is_async(self._agent):
            return await awaited(call())
        result = await to_thread.run_sync(call, limiter=self._threads, abandon_on_cancel=True)
        return await awaited(result)

    async def _resources(self, attempt: Attempt) -> dict[str, Any]:
        values: dict[str, JsonValue] = {}
        for name, version in attempt.resources.items():
            if (name, version) not in self._known:
                self._known[name, version] = (await self._store.get(name, version)).value
            values[name] = self._known[name, version]
        return asked_for(self._agent, values)

    async def _keep_lease(self, attempt: Attempt, scope: CancelScope) -> None:
        with suppress(LeaseLost):
            while True:
                await anyio.sleep(self._lease_s / 3)
                await self._store.heartbeat(attempt.id, lease_s=self._lease_s)
        scope.cancel()

    async def _stop_when_ended(self, attempt: Attempt, scope: CancelScope) -> None:
        with suppress(NotFound):  # its run was dropped
            await self._store.ended(attempt.id)
        scope.cancel()

    async def _stop_when_leaving(self, scope: CancelScope) -> None:
        await self._hand_back.wait()
        scope.cancel()
