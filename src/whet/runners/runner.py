"""The runner: claims rollouts and runs the agent on each, many at once."""

import asyncio
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
from whet.protocols import (
    AttemptWatch,
    CallLog,
    Listings,
    Resources,
    RewardLog,
    RolloutQueue,
    SpanLog,
)
from whet.runners.agent import Agent
from whet.runners.attempt import (
    NO_GATEWAY,
    AttemptExecution,
    check_runnable,
    open_attempt_execution,
)
from whet.runners.context import AttemptContext
from whet.runners.diagnostics import Diagnostics, ExplainUnread, read_all
from whet.runners.endpoints import Connection, Endpoints
from whet.runners.hooks import Hooks
from whet.types import Attempt, AttemptId, Failure, FailureKind, Outcome

logger = logging.getLogger(__name__)

CLAIM_WAIT_S = 30.0
MAX_CONCURRENT_CLAIMS = 128
"""A store commits concurrent claims together."""
CLAIM_GROWTH = 8
"""Factor by which the number of claims grows while all of them succeed."""

RELEASED = Outcome(
    failure=Failure(
        kind=FailureKind.WORKER_LEFT, message="the worker shut down and released the attempt"
    )
)


class RunnerStore(
    RolloutQueue,
    AttemptWatch,
    CallLog,
    RewardLog,
    SpanLog,
    Resources,
    Listings,
    Protocol,
):
    """The protocols of a store that a runner uses."""


class Runner:
    """Claims rollouts and runs the agent on each.

    Async agents share an event loop, sync ones get a thread each; with `processes` each attempt
    has a process. A failure is recorded on the attempt and the next one is claimed: a bad rollout
    is data, not a crash. An attempt that was ended in the store is stopped at once: an async
    agent is canceled, a process is killed, and a sync agent is left alone in its thread with a
    model that no longer answers it.
    """

    def __init__(
        self,
        agent: Agent,
        config: RunnerConfig,
        *,
        store: RunnerStore,
        endpoints: Endpoints,
        name: str | None = None,
        hooks: Sequence[Hooks] = (),
        on_outcome: Callable[[Attempt, Outcome], None] = lambda attempt, outcome: None,
        on_warning: Callable[[str], None] | None = None,
        explain_unread: ExplainUnread = read_all,
    ) -> None:
        """`name` is the worker's in the store; a previous worker of that name counts as dead.

        `on_warning` is called with what `Diagnostics` finds; without it nothing is checked.
        `explain_unread` returns why the training reads no such reward; empty if it does.

        Raises:
            ConfigError: the agent is invalid, or cannot be imported by the processes.
        """
        check_runnable(agent, config)
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._is_named = name is not None
        self._agent = agent
        self._config = config
        self._hooks = tuple(hooks)
        self._capacity = config.concurrency
        self._lease_s = config.lease_s
        self._store = store
        self._endpoints = endpoints
        self._on_outcome = on_outcome
        self._diagnostics: Diagnostics | None = None
        if on_warning is not None:
            self._diagnostics = Diagnostics(store, self.name, on_warning, explain_unread)
        self._slots = Semaphore(self._capacity)
        self._running: dict[AttemptId, CancelScope] = {}
        self._claiming = CancelScope()
        self._grace_s = 0.0
        self._is_releasing = False

    async def run(self) -> None:
        """Run attempts until canceled, or until `drain` is called.

        Raises:
            ConfigError: the agent cannot be loaded, in this process or in another.
        """
        async with open_attempt_execution(
            self._agent,
            self._config,
            name=self.name,
            hooks=self._hooks,
            endpoints=self._endpoints,
            store=self._store,
        ) as execution:
            await self._run_attempts(execution)

    async def _run_attempts(self, execution: AttemptExecution) -> None:
        if self._is_named:
            await self._release_orphans()
        async with create_task_group() as leases:
            leases.start_soon(self._renew_leases)
            async with create_task_group() as attempts:
                with self._claiming:
                    await self._claim_forever(attempts, execution)
                with move_on_after(self._grace_s):
                    while self._running:
                        await self._slots.acquire()
                self._is_releasing = True
                for scope in self._running.values():
                    scope.cancel()
            leases.cancel_scope.cancel()
        await self._release_orphans()

    async def _claim_forever(self, attempts: TaskGroup, execution: AttemptExecution) -> None:
        """Wait for a rollout with one claim; while all claims succeed, make more at once."""
        wanted = 1
        while True:
            count = await self._take_slots(wanted)
            await self._endpoints.wait_ready()
            wait_s = CLAIM_WAIT_S if wanted == 1 else 0.0
            claimed: list[Attempt] = []
            # Lighter than anyio's, which attempts need: it cancels nothing that they shield.
            async with asyncio.TaskGroup() as claims:
                for _ in range(count):
                    claims.create_task(self._claim(wait_s, claimed, attempts, execution))
            is_more = len(claimed) == count
            wanted = min(CLAIM_GROWTH * wanted, MAX_CONCURRENT_CLAIMS) if is_more else 1

    async def _take_slots(self, most: int) -> int:
        """Wait for a free slot, and take as many as are free; returns their number."""
        await self._slots.acquire()
        taken = 1
        while taken < most and self._slots.value:
            self._slots.acquire_nowait()
            taken += 1
        return taken

    async def _claim(
        self,
        wait_s: float,
        claimed: list[Attempt],
        attempts: TaskGroup,
        execution: AttemptExecution,
    ) -> None:
        """Claim a rollout and begin to run it in a slot; without one, give the slot back."""
        attempt = await self._store.claim(self.name, lease_s=self._lease_s, wait_s=wait_s)
        if attempt is None:
            self._slots.release()
        else:
            claimed.append(attempt)
            self._running[attempt.id] = CancelScope()
            attempts.start_soon(self._run_and_release, attempt, execution)

    def drain(self, grace_s: float) -> None:
        """Claim nothing more, wait so long for running attempts, and release those left then."""
        logger.info("runner drains name=%s running=%d", self.name, len(self._running))
        self._grace_s = grace_s
        self._claiming.cancel()

    @property
    def running(self) -> int:
        """Number of running attempts."""
        return len(self._running)

    async def _release_orphans(self) -> None:
        """Release attempts that the store counts as this worker's but that do not run here.

        A claim whose response was lost, or attempts of a killed worker of the same name.
        """
        for worker in await self._store.workers():
            if worker.name == self.name:
                for attempt in set(worker.running) - self._running.keys():
                    with suppress(LeaseLost):
                        await self._store.finish(attempt, RELEASED)

    async def _run_and_release(self, attempt: Attempt, execution: AttemptExecution) -> None:
        try:
            if (prepared := execution.prepare(attempt)) is None:  # lost since the claim
                await self._report(attempt, NO_GATEWAY)
            else:
                await self._run_one(*prepared, execution)
        finally:
            del self._running[attempt.id]
            self._slots.release()

    async def _run_one(
        self, context: AttemptContext, connection: Connection, execution: AttemptExecution
    ) -> None:
        attempt, outcome = context.attempt, RELEASED
        scope = self._running[attempt.id]
        watch = asyncio.create_task(self._wait_until_ended(attempt))
        watch.add_done_callback(lambda _: scope.cancel())
        with scope:
            try:
                outcome = await execution.run(context, connection)
            finally:
                watch.cancel()
        if watch.done() and not watch.cancelled():
            watch.result()  # raises the error of a store that cannot be watched
        if context.spans:
            with suppress(NotFound):  # its run was dropped
                await self._store.record(attempt.id, context.spans)
        if outcome is RELEASED and not self._is_releasing:
            logger.warning("attempt was ended in the store attempt=%s", attempt.id)
            return
        if self._diagnostics is not None:  # before the report, after which the process may end
            await self._diagnostics.check(attempt, outcome, context.reward_lines)
        await self._report(attempt, outcome, context)

    async def _report(
        self, attempt: Attempt, outcome: Outcome, context: AttemptContext | None = None
    ) -> None:
        try:
            for reward in context.rewards if context else ():
                await self._store.emit(attempt.id, reward)
            await self._store.finish(attempt.id, outcome)
        except (LeaseLost, NotFound):  # or its run was dropped
            logger.warning("attempt reported too late attempt=%s", attempt.id)
            return
        self._on_outcome(attempt, outcome)

    async def _renew_leases(self) -> None:
        while True:
            await anyio.sleep(self._lease_s / 3)
            async with create_task_group() as heartbeats:
                for attempt, scope in self._running.items():
                    heartbeats.start_soon(self._renew_lease, attempt, scope)

    async def _renew_lease(self, attempt: AttemptId, scope: CancelScope) -> None:
        try:
            await self._store.heartbeat(attempt, lease_s=self._lease_s)
        except (LeaseLost, NotFound):  # or its run was dropped
            scope.cancel()

    async def _wait_until_ended(self, attempt: Attempt) -> None:
        with suppress(NotFound):  # its run was dropped
            await self._store.ended(attempt.id)
