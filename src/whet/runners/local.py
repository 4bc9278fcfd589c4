"""Claims rollouts and has the agent run on each, many at once."""

import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import anyio
from anyio import CancelScope, Semaphore, create_task_group, move_on_after
from anyio.abc import TaskGroup

from whet.config import RunnerConfig
from whet.errors import LeaseLost, NotFound
from whet.protocols import AttemptLog, AttemptWatch, Directory, Resources, RolloutQueue, SpanLog
from whet.runners.agent import Agent
from whet.runners.execution import NO_GATEWAY, Execution, check_runnable, open_execution
from whet.runners.gateways import Connection, Gateways
from whet.runners.hooks import Hooks
from whet.runners.preflight import Preflight
from whet.runners.running import Running
from whet.types import Attempt, AttemptId, Failure, FailureKind, Outcome

logger = logging.getLogger(__name__)

CLAIM_WAIT_S = 30.0
CLAIMS_AT_ONCE = 32
"""A store that is elsewhere takes its time to answer, and does claims of one moment together."""

HANDED_BACK = Outcome(
    failure=Failure(kind=FailureKind.WORKER_LEFT, message="its worker left and handed it back")
)


class Work(RolloutQueue, AttemptWatch, AttemptLog, SpanLog, Resources, Directory, Protocol):
    """What a runner needs of a store."""


class LocalRunner:
    """Claims rollouts and runs the agent on each.

    Async agents share an event loop, sync ones get a thread each; with `processes` each attempt
    has a process. A failure is recorded on the attempt and the next one is claimed: a bad rollout
    is data, not a crash. An attempt that was ended from elsewhere is stopped at once: an async
    agent is cancelled, a process is killed, and a sync agent is left alone in its thread with a
    model that no longer answers it.
    """

    def __init__(
        self,
        agent: Agent,
        config: RunnerConfig,
        *,
        store: Work,
        gateways: Gateways,
        name: str | None = None,
        hooks: Sequence[Hooks] = (),
        on_outcome: Callable[[Attempt, Outcome], None] = lambda attempt, outcome: None,
        on_warning: Callable[[str], None] | None = None,
    ) -> None:
        """`name` is the worker's in the store; one that had it before is taken to be dead.

        `on_warning` is told what would spoil the training; without it that is not looked for.

        Raises:
            ConfigError: the agent is none, or cannot be found by the processes asked for.
        """
        check_runnable(agent, config)
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._is_renamed = name is not None
        self._agent = agent
        self._config = config
        self._hooks = tuple(hooks)
        self._at_once = config.processes or config.concurrency
        self._lease_s = config.lease_s
        self._store = store
        self._gateways = gateways
        self._on_outcome = on_outcome
        self._preflight = Preflight(store, self.name, on_warning) if on_warning else None
        self._slots = Semaphore(self._at_once)
        self._running: dict[AttemptId, CancelScope] = {}
        self._claiming = CancelScope()
        self._grace_s = 0.0
        self._is_handing_back = False

    async def run(self) -> None:
        """Work until cancelled, or until told to leave.

        Raises:
            ConfigError: the agent cannot be made, here or in a process.
        """
        async with open_execution(
            self._agent,
            self._config,
            name=self.name,
            hooks=self._hooks,
            gateways=self._gateways,
            resources=self._store,
        ) as execution:
            await self._work(execution)

    async def _work(self, execution: Execution) -> None:
        if self._is_renamed:
            await self._return_strays()
        async with create_task_group() as leases:
            leases.start_soon(self._keep_leases)
            async with create_task_group() as attempts:
                with self._claiming:
                    async with create_task_group() as claims:
                        for _ in range(min(CLAIMS_AT_ONCE, self._at_once)):
                            claims.start_soon(self._claim, attempts, execution)
                with move_on_after(self._grace_s):
                    while self._running:
                        await self._slots.acquire()
                self._is_handing_back = True
                for scope in self._running.values():
                    scope.cancel()
            leases.cancel_scope.cancel()
        await self._return_strays()

    async def _claim(self, attempts: TaskGroup, execution: Execution) -> None:
        while True:
            await self._slots.acquire()
            await self._gateways.ready()
            attempt = await self._store.claim(self.name, lease_s=self._lease_s, wait_s=CLAIM_WAIT_S)
            if attempt is None:
                self._slots.release()
            else:
                self._running[attempt.id] = CancelScope()
                attempts.start_soon(self._run_and_release, attempt, execution)

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
                for attempt in set(worker.running) - self._running.keys():
                    with suppress(LeaseLost):
                        await self._store.finish(attempt, HANDED_BACK)

    async def _run_and_release(self, attempt: Attempt, execution: Execution) -> None:
        try:
            if (begun := execution.begin(attempt)) is None:  # lost while this was being claimed
                await self._report(attempt, NO_GATEWAY)
            else:
                await self._run_one(*begun, execution)
        finally:
            del self._running[attempt.id]
            self._slots.release()

    async def _run_one(self, now: Running, connection: Connection, execution: Execution) -> None:
        attempt, outcome = now.attempt, HANDED_BACK
        with self._running[attempt.id] as scope:
            async with create_task_group() as tasks:
                tasks.start_soon(self._stop_when_ended, attempt, scope)
                outcome = await execution.outcome(now, connection)
                tasks.cancel_scope.cancel()
        if now.spans:
            with suppress(NotFound):  # its run was dropped
                await self._store.record(attempt.id, now.spans)
        if outcome is HANDED_BACK and not self._is_handing_back:
            logger.warning("attempt was ended from elsewhere attempt=%s", attempt.id)
            return
        if self._preflight is not None:  # before the end, after which the process may be left
            await self._preflight.look(attempt, outcome)
        await self._report(attempt, outcome, now)

    async def _report(self, attempt: Attempt, outcome: Outcome, now: Running | None = None) -> None:
        try:
            for reward in now.rewards if now else ():
                await self._store.emit(attempt.id, reward)
            await self._store.finish(attempt.id, outcome)
        except LeaseLost:
            logger.warning("attempt reported too late attempt=%s", attempt.id)
            return
        self._on_outcome(attempt, outcome)

    async def _keep_leases(self) -> None:
        while True:
            await anyio.sleep(self._lease_s / 3)
            async with create_task_group() as beats:
                for attempt, scope in self._running.items():
                    beats.start_soon(self._keep_lease, attempt, scope)

    async def _keep_lease(self, attempt: AttemptId, scope: CancelScope) -> None:
        try:
            await self._store.heartbeat(attempt, lease_s=self._lease_s)
        except LeaseLost:
            scope.cancel()

    async def _stop_when_ended(self, attempt: Attempt, scope: CancelScope) -> None:
        with suppress(NotFound):  # its run was dropped
            await self._store.ended(attempt.id)
        scope.cancel()
