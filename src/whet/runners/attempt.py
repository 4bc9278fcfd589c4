"""The life of one attempt: its endpoint, its resources, hooks, the agent, and the outcome."""

import inspect
import logging
import math
import os
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
from anyio import CancelScope, to_thread
from pydantic import JsonValue

from whet.config import RunnerConfig
from whet.errors import (
    AgentFailed,
    AttemptError,
    AttemptTimeout,
    BadReward,
    ConfigError,
    WhetError,
    boundary,
)
from whet.io.attempt_url import shorten_attempt_urls
from whet.io.genai_spans import find_refusals
from whet.runners.agent import Agent, await_result, check_agent, get_name, inspect_agent
from whet.runners.context import AttemptContext
from whet.runners.diagnostics import DiagnosticsStore
from whet.runners.endpoints import Connection, Endpoints
from whet.runners.environments.hosted_agent import EnvironmentAgent
from whet.runners.executors.command import CommandAgent
from whet.runners.executors.executor import Evicted, Executor
from whet.runners.executors.http_service import Service
from whet.runners.executors.in_process import InProcessExecutor, UserCodeRunner
from whet.runners.executors.process_pool import ProcessPool
from whet.runners.hooks import Hooks, check_hook
from whet.runners.loading import get_spec
from whet.runners.tracers import check_tracer, install_tracer
from whet.types import Attempt, AttemptId, Failure, FailureKind, Outcome

logger = logging.getLogger(__name__)

HOOK_TIMEOUT_S = 60.0
FEW_CORES = 2
"""Up to this many cores, processes for agents only cost memory."""
OTHER_CORES = 4
"""Cores of a large machine that are left to engine, trainer, gateways and store."""
MAX_PROCESSES = 12
"""By default; more than the gateways keep busy."""

FAILURE_KINDS: dict[type[AttemptError], FailureKind] = {
    AgentFailed: FailureKind.AGENT,
    AttemptTimeout: FailureKind.TIMEOUT,
    BadReward: FailureKind.BAD_REWARD,
}

PROMPT_TOO_LONG = re.compile(
    r"this model's (maximum )?context|context_length_exceeded", re.IGNORECASE
)
"""The gateway's reply to a prompt that is too long, as SDKs repeat it in their errors."""

NO_GATEWAY = Outcome(
    failure=Failure(kind=FailureKind.MODEL_LOST, message="no gateway answered when it began")
)


class AttemptExecution:
    """Runs single attempts of an agent, with hooks and resources."""

    def __init__(
        self,
        executor: Executor,
        hooks: "HookRunner",
        endpoints: Endpoints,
        store: DiagnosticsStore,
        *,
        is_alone: bool,
    ) -> None:
        self._executor = executor
        self._hooks = hooks
        self._endpoints = endpoints
        self._store = store
        self._is_alone = is_alone
        self._resource_cache: dict[tuple[str, int], JsonValue] = {}
        """By name and version: they never change."""

    def prepare(self, attempt: Attempt) -> tuple[AttemptContext, Connection] | None:
        """Return the context and the connection of an attempt; None without a live gateway."""
        connection = self._endpoints.connect(attempt)
        if connection is None:
            return None
        return AttemptContext(attempt, connection.endpoint, is_alone=self._is_alone), connection

    async def run(self, context: AttemptContext, connection: Connection) -> Outcome:
        """Run the agent and return the outcome. Canceling this call stops the agent."""
        try:
            await self._hooks.before(context)
            reward = await self._executor.run(context, await self._get_resources(context.attempt))
            outcome = Outcome(reward=reward)
        except Evicted as error:
            outcome = _build_failed_outcome(FailureKind.WORKER_LEFT, error)
        except AttemptError as error:
            kind = await self._classify(error, context.attempt.id, connection)
            outcome = _build_failed_outcome(kind, error)
            logger.info(
                "attempt failed attempt=%s kind=%s reason=%s", context.attempt.id, kind.value, error
            )
        await self._hooks.after(context, outcome)
        return outcome

    async def _classify(
        self, error: AttemptError, attempt: AttemptId, connection: Connection
    ) -> FailureKind:
        # Without its model an agent may fail in any way: then the gateway is the reason.
        if not isinstance(error, BadReward) and await connection.was_lost():
            return FailureKind.MODEL_LOST
        if isinstance(error, AgentFailed) and (
            PROMPT_TOO_LONG.search(str(error)) or await self._has_ended_with_full_context(attempt)
        ):
            return FailureKind.CONTEXT_LENGTH
        return next(kind for cls, kind in FAILURE_KINDS.items() if isinstance(error, cls))

    async def _has_ended_with_full_context(self, attempt: AttemptId) -> bool:
        """Whether the last model call was refused as too long, which the agent's error may hide."""
        spans = await self._store.spans(attempt)
        refused = [s.start for s in find_refusals(spans) if PROMPT_TOO_LONG.search(s.message)]
        if not refused:
            return False
        calls = await self._store.calls(attempt)
        return all(call.created * 1e9 <= max(refused) for call in calls)

    async def _get_resources(self, attempt: Attempt) -> dict[str, JsonValue]:
        values: dict[str, JsonValue] = {}
        for key in attempt.resources.items():
            if key not in self._resource_cache:
                self._resource_cache[key] = (await self._store.get(*key)).value
            values[key[0]] = self._resource_cache[key]
        return values


@asynccontextmanager
async def open_attempt_execution(
    agent: Agent,
    config: RunnerConfig,
    *,
    name: str,
    hooks: Sequence[Hooks],
    endpoints: Endpoints,
    store: DiagnosticsStore,
) -> AsyncGenerator[AttemptExecution]:
    """Start the executor and the hooks of a runner; stop them at the end of the block.

    Raises:
        ConfigError: the agent cannot be loaded, in this process or in another, or a hook raised.
    """
    checked_hooks = [check_hook(hook) for hook in hooks]
    user_code = UserCodeRunner(config.concurrency)
    hook_runner = HookRunner(checked_hooks, user_code)
    executor: Executor | None = None
    try:
        if processes := count_processes(agent, config):
            attempts_each = math.ceil(config.concurrency / processes)
            python = agent.python if isinstance(agent, EnvironmentAgent) else None
            executor = await ProcessPool.start(
                get_spec(agent), processes, attempts_each, config.tracer, python
            )
        else:
            if config.tracer:
                install_tracer(config.tracer)
            executor = InProcessExecutor(inspect_agent(agent), user_code)
        await hook_runner.on_start(name)
        is_alone = config.concurrency == 1  # in this process; a pool decides it by process
        yield AttemptExecution(executor, hook_runner, endpoints, store, is_alone=is_alone)
    finally:
        with CancelScope(shield=True):
            await hook_runner.on_end(name)
            if executor is not None:
                await executor.close()
            await user_code.close()


def count_processes(agent: Agent, config: RunnerConfig) -> int:
    """Processes to run an agent in; 0 for this one.

    By default half the cores, or all but four where that is more, since the client code of agents
    keeps cores busy that gateway, engine and trainer need. 0 for an agent that other processes
    cannot import, or that is a command or a service.
    """
    if config.processes is not None:
        return min(config.processes, config.concurrency)
    if isinstance(agent, EnvironmentAgent) and agent.python:
        return 1
    cores = len(os.sched_getaffinity(0))
    if cores <= FEW_CORES or isinstance(agent, CommandAgent | Service):
        return 0
    try:
        get_spec(agent)
    except ConfigError:
        return 0
    return min(max(cores // 2, cores - OTHER_CORES), MAX_PROCESSES, config.concurrency)


def check_runnable(agent: Agent, config: RunnerConfig) -> None:
    """Raise ConfigError for an agent that cannot be run with this config."""
    check_agent(agent)
    if config.tracer:
        check_tracer(config.tracer)
        if isinstance(agent, CommandAgent):
            raise ConfigError(
                "a tracer is for agents in Python: leave it out, and have the command export its "
                "spans to OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, which is in its environment"
            )
        if type(agent) is Service:
            raise ConfigError(
                "a tracer is for agents in Python: leave it out, and have the service export its "
                "spans to the traces_url in each of its requests"
            )
    if config.processes:
        get_spec(agent)
    elif config.processes == 0 and isinstance(agent, EnvironmentAgent) and agent.python:
        raise ConfigError(
            "an environment's own Python runs in a process of its own: leave out runner.processes 0"
        )


def _build_failed_outcome(kind: FailureKind, error: Exception) -> Outcome:
    trace = error.traceback if isinstance(error, AttemptError) else ""
    message = shorten_attempt_urls(str(error))  # equal failures have one reason; the trace has it
    return Outcome(failure=Failure(kind=kind, message=message, traceback=trace))


class HookRunner:
    """Calls hooks: in order before an attempt, in reverse order after it."""

    def __init__(self, hooks: Sequence[Hooks], user_code: UserCodeRunner) -> None:
        self._hooks = tuple(hooks)
        self._user_code = user_code
        self._started: list[Hooks] = []

    async def on_start(self, runner: str) -> None:
        """Raises ConfigError if a hook raises."""
        for hook in self._hooks:
            with boundary(ConfigError, f"the hook {get_name(hook)}.on_start raised"):
                await _call_hook(partial(hook.on_start, runner))
            self._started.append(hook)

    async def on_end(self, runner: str) -> None:
        """Call each hook that has started, even if others raise."""
        for hook in reversed(self._started):
            try:
                with boundary(WhetError, f"the hook {get_name(hook)}.on_end raised"):
                    await _call_hook(partial(hook.on_end, runner))
            except WhetError as error:
                logger.warning("%s", error)

    async def before(self, context: AttemptContext) -> None:
        """Raises AgentFailed if a hook raises; those after it are not called."""
        for hook in self._hooks:
            try:
                await self._call(context, partial(hook.before, context.attempt))
            except WhetError as error:
                raise AgentFailed(
                    f"the hook {get_name(hook)}.before {_describe_hook_error(error)}"
                ) from error

    async def after(self, context: AttemptContext, outcome: Outcome) -> None:
        """Call each hook, even if others raise."""
        for hook in reversed(self._hooks):
            try:
                await self._call(context, partial(hook.after, context.attempt, outcome))
            except WhetError as error:
                logger.warning("the hook %s.after %s", get_name(hook), _describe_hook_error(error))

    async def _call(self, context: AttemptContext, hook: Callable[[], Any]) -> None:
        async def work() -> float:
            await self._user_code.call(hook, is_async=_is_async_hook(hook))
            return 0.0

        await self._user_code.run(context.copy_for_hook(), work, HOOK_TIMEOUT_S)


def _describe_hook_error(error: WhetError) -> str:
    return str(error).removeprefix("the agent ")


def _is_async_hook(hook: Callable[[], Any]) -> bool:
    return isinstance(hook, partial) and inspect.iscoroutinefunction(hook.func)


async def _call_hook(hook: Callable[[], Any]) -> None:
    with anyio.fail_after(HOOK_TIMEOUT_S):
        await await_result(hook() if _is_async_hook(hook) else await to_thread.run_sync(hook))
