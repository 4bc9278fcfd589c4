"""One attempt from beginning to end: its model, its resources, hooks, the agent, how it went."""

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from anyio import CancelScope
from pydantic import JsonValue

from whet.config import RunnerConfig
from whet.errors import AgentFailed, AttemptError, AttemptTimeout, BadReward, ConfigError
from whet.protocols import Resources
from whet.runners.agent import Agent, check_agent, read_agent
from whet.runners.command import Command
from whet.runners.gateways import Connection, Gateways
from whet.runners.hooks import HookRunner, Hooks
from whet.runners.in_process import Displaced, InProcess, Room, Workplace
from whet.runners.loading import spec_of
from whet.runners.pool import Pool
from whet.runners.running import Running
from whet.runners.service import Service
from whet.runners.tracers import check_tracer, install_tracer
from whet.types import Attempt, Failure, FailureKind, Outcome

logger = logging.getLogger(__name__)

KINDS: dict[type[AttemptError], FailureKind] = {
    AgentFailed: FailureKind.AGENT,
    AttemptTimeout: FailureKind.TIMEOUT,
    BadReward: FailureKind.REWARD,
}

NO_GATEWAY = Outcome(
    failure=Failure(kind=FailureKind.MODEL_LOST, message="no gateway answered when it began")
)


class Execution:
    """Has the agent run on attempts, each on its own."""

    def __init__(
        self,
        workplace: Workplace,
        hooks: HookRunner,
        gateways: Gateways,
        resources: Resources,
        *,
        is_alone: bool,
    ) -> None:
        self._workplace = workplace
        self._hooks = hooks
        self._gateways = gateways
        self._resources = resources
        self._is_alone = is_alone
        self._known: dict[tuple[str, int], JsonValue] = {}
        """Values of resources, which never change."""

    def begin(self, attempt: Attempt) -> tuple[Running, Connection] | None:
        """What an attempt needs to run; None if no gateway was there any more."""
        connection = self._gateways.connect(attempt)
        if connection is None:
            return None
        return Running(attempt, connection.endpoint, is_alone=self._is_alone), connection

    async def outcome(self, now: Running, connection: Connection) -> Outcome:
        """Run the agent, and say how it went. Cancelled, it stops the agent."""
        try:
            await self._hooks.before(now)
            reward = await self._workplace.reward(now, await self._values(now.attempt))
            outcome = Outcome(reward=reward)
        except Displaced as error:
            outcome = _failed(FailureKind.WORKER_LEFT, error)
        except AttemptError as error:
            kind = await self._kind(error, connection)
            outcome = _failed(kind, error)
            logger.warning(
                "attempt failed attempt=%s kind=%s reason=%s", now.attempt.id, kind.value, error
            )
        await self._hooks.after(now, outcome)
        return outcome

    async def _kind(self, error: AttemptError, connection: Connection) -> FailureKind:
        # An agent without its model fails in any way, late or soon.
        if not isinstance(error, BadReward) and await connection.was_lost():
            return FailureKind.MODEL_LOST
        return next(kind for of, kind in KINDS.items() if isinstance(error, of))

    async def _values(self, attempt: Attempt) -> dict[str, JsonValue]:
        values: dict[str, JsonValue] = {}
        for name, version in attempt.resources.items():
            if (name, version) not in self._known:
                self._known[name, version] = (await self._resources.get(name, version)).value
            values[name] = self._known[name, version]
        return values


@asynccontextmanager
async def open_execution(
    agent: Agent,
    config: RunnerConfig,
    *,
    name: str,
    hooks: Sequence[Hooks],
    gateways: Gateways,
    resources: Resources,
) -> AsyncGenerator[Execution]:
    """Agents may run while the block works.

    Raises:
        ConfigError: the agent cannot be made, here or in a process, or a hook refuses.
    """
    room = Room(config.concurrency)
    told = HookRunner(hooks, room)
    workplace: Workplace | None = None
    try:
        if config.processes:
            workplace = await Pool.start(spec_of(agent), config.processes, config.tracer)
        else:
            install_tracer(config.tracer)
            workplace = InProcess(read_agent(agent), room)
        await told.on_start(name)
        # A process is alone by itself, and says so.
        is_alone = config.concurrency == 1
        yield Execution(workplace, told, gateways, resources, is_alone=is_alone)
    finally:
        with CancelScope(shield=True):
            await told.on_end(name)
            if workplace is not None:
                await workplace.close()
            await room.close()


def check_runnable(agent: Agent, config: RunnerConfig) -> None:
    """Refuse an agent that cannot be run as a config asks, before anything is started."""
    check_agent(agent)
    check_tracer(config.tracer)
    if config.tracer and isinstance(agent, Command):
        raise ConfigError(
            "a tracer is for agents in Python: leave it out, and have the command export its spans "
            "to OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, which is in its environment"
        )
    if config.tracer and type(agent) is Service:
        raise ConfigError(
            "a tracer is for agents in Python: leave it out, and have the service export its spans "
            "to the traces_url that each of its requests has"
        )
    if config.processes:
        spec_of(agent)


def _failed(kind: FailureKind, error: Exception) -> Outcome:
    return Outcome(failure=Failure(kind=kind, message=str(error)))
