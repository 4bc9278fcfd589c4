"""Config to objects: everything of a run in one process."""

import os
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import cast

from anyio import create_task_group

from whet.algorithms.grpo import GRPO
from whet.app.folder import RunFolder
from whet.config import RunConfig
from whet.engines.grammar import Grammars
from whet.engines.local import LocalEngine
from whet.gateway import keys
from whet.gateway.app import build_app
from whet.gateway.render import Renderer
from whet.gateway.service import Service
from whet.gateway.template import ChatTemplate
from whet.policies.catalogue import resolve_model
from whet.policies.local import LocalPolicy
from whet.protocols import Algorithm, Collector, Trainer
from whet.runners.agent import Agent, check_agent
from whet.runners.collect import QueueCollector
from whet.runners.gateways import OwnGateway
from whet.runners.local import LocalRunner
from whet.serving import AppServer
from whet.store.sqlite import SQLiteStore
from whet.trainers.local import LocalTrainer
from whet.types import Attempt, Endpoint, Outcome

POLICY = "policy"
"""The name agents see as their model."""

SMALL_MODEL = 20_000_000
"""Parameters up to which one thread samples fastest."""


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run, at work."""

    config: RunConfig
    folder: RunFolder
    store: SQLiteStore
    collector: Collector
    algorithm: Algorithm
    trainer: Trainer


@asynccontextmanager
async def open_run(
    agent: Agent,
    folder: RunFolder,
    *,
    on_outcome: Callable[[Attempt, Outcome], None],
    progress: Callable[[str], None],
) -> AsyncGenerator[Run]:
    """Start store, engine, gateway and runner; stop them in turn when done."""
    check_agent(agent)
    config = folder.config()
    model = resolve_model(config.model, progress=progress)
    cores = os.cpu_count() or 1
    async with AsyncExitStack() as stack:
        stack.enter_context(folder.owned())
        store = await stack.enter_async_context(SQLiteStore(folder.store))
        # This process owns the run, so whoever held a lease before is dead.
        await store.release_workers()
        policy = LocalPolicy(model, config.trainer, device=config.engine.device, seed=config.seed)
        trainer = LocalTrainer(policy, threads=cores)
        # Before anybody samples: what a kill left in the queue runs as soon as there is a runner.
        if done := await store.steps():
            await trainer.restore(folder.checkpoints / done[-1].checkpoint)
        serving = _serve(folder, config, policy, store, threads=_sampler_threads(policy, cores))
        endpoint = await stack.enter_async_context(serving)
        runner = LocalRunner(
            agent,
            config.runner,
            store=store,
            gateways=OwnGateway(endpoint),
            on_outcome=on_outcome,
        )
        run = Run(
            config=config,
            folder=folder,
            store=store,
            collector=QueueCollector(queue=store, log=store),
            algorithm=GRPO(config.algorithm),
            trainer=trainer,
        )
        async with _at_work(runner):
            yield run


@asynccontextmanager
async def _serve(
    folder: RunFolder, config: RunConfig, policy: LocalPolicy, store: SQLiteStore, *, threads: int
) -> AsyncGenerator[Callable[[Attempt], Endpoint]]:
    """Engine and gateway at work; gives where an attempt reaches its model."""
    async with AsyncExitStack() as stack:
        template = ChatTemplate(policy.folder)
        renderer = Renderer(template, keep_thinking=config.gateway.keep_thinking)
        grammars = Grammars(policy.folder, renderer.stop_ids)
        engine = LocalEngine(
            policy, config.engine, template.decode, grammars=grammars, threads=threads
        )
        stack.push_async_callback(engine.close)
        names = (POLICY, *config.gateway.models)
        service = Service(
            engine=engine,
            log=store,
            renderer=renderer,
            models=names,
            context_length=engine.context_length,
        )
        secret = folder.secret()
        server = AppServer(
            build_app(service, store, secret, config.gateway),
            host=config.gateway.host,
            port=config.gateway.port,
            name="gateway",
            port_flag="--gateway.port",
        )
        stack.callback(server.close)
        # Ahead of the server, which waits for its requests: none is left without an answer.
        stack.push_async_callback(engine.close)

        def endpoint(attempt: Attempt) -> Endpoint:
            """Path and key both name the attempt."""
            path = f"/rollout/{attempt.rollout.id}/attempt/{attempt.id}/v1"
            key = keys.mint(attempt.id, secret)
            return Endpoint(base_url=server.url + path, api_key=key, model=POLICY)

        yield endpoint


def _sampler_threads(policy: LocalPolicy, cores: int) -> int:
    """A small model gains nothing from more threads, and loses much where agents share cores."""
    size = sum(parameter.numel() for parameter in policy.model.parameters())
    return 1 if size < SMALL_MODEL else cores


@asynccontextmanager
async def _at_work(runner: LocalRunner) -> AsyncGenerator[None]:
    """Have the runner claim rollouts until the block ends; a failure of either is raised as is."""
    try:
        async with create_task_group() as tasks:
            tasks.start_soon(runner.run)
            yield
            tasks.cancel_scope.cancel()
    except ExceptionGroup as group:
        raise _first(group) from group


def _first(group: ExceptionGroup[Exception]) -> Exception:
    error = group.exceptions[0]
    if isinstance(error, ExceptionGroup):
        return _first(cast(ExceptionGroup[Exception], error))
    return error
