"""Config to objects: everything of a run in one process."""

import os
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from whet.algorithms.grpo import GRPO
from whet.app.folder import RunFolder
from whet.app.working import agents_at_work, endpoint_of
from whet.config import RunConfig
from whet.engines.grammar import Grammars
from whet.engines.local import LocalEngine
from whet.gateway.app import build_app
from whet.gateway.render import Renderer
from whet.gateway.service import Service
from whet.gateway.template import ChatTemplate
from whet.policies.catalogue import resolve_model
from whet.policies.local import LocalPolicy
from whet.protocols import Algorithm, AttemptLog, Collector, Trainer
from whet.runners.agent import Agent, check_agent
from whet.runners.collect import QueueCollector
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
    async with AsyncExitStack() as stack:
        stack.enter_context(folder.owned())
        store = await stack.enter_async_context(SQLiteStore(folder.store))
        # This process owns the run, so whoever held a lease before is dead.
        await store.release_workers()
        policy = LocalPolicy(model, config.trainer, device=config.engine.device, seed=config.seed)
        trainer = LocalTrainer(policy, threads=os.cpu_count() or 1)
        # Before anybody samples: what a kill left in the queue runs as soon as there is a runner.
        if done := await store.steps():
            await trainer.restore(folder.checkpoints / done[-1].checkpoint)
        serving = serve(policy, config, store, folder.secret())
        endpoint = await stack.enter_async_context(serving)
        run = Run(
            config=config,
            folder=folder,
            store=store,
            collector=QueueCollector(queue=store, log=store),
            algorithm=GRPO(config.algorithm),
            trainer=trainer,
        )
        async with agents_at_work(agent, config.runner, store, endpoint, on_outcome):
            yield run


@asynccontextmanager
async def serve(
    policy: LocalPolicy, config: RunConfig, log: AttemptLog, secret: bytes
) -> AsyncGenerator[Callable[[Attempt], Endpoint]]:
    """Engine and gateway at work; gives where an attempt reaches its model."""
    async with AsyncExitStack() as stack:
        template = ChatTemplate(policy.folder)
        renderer = Renderer(template, keep_thinking=config.gateway.keep_thinking)
        grammars = Grammars(policy.folder, renderer.stop_ids)
        engine = LocalEngine(
            policy,
            config.engine,
            template.decode,
            grammars=grammars,
            threads=_sampler_threads(policy),
        )
        stack.push_async_callback(engine.close)
        names = (POLICY, *config.gateway.models)
        service = Service(
            engine=engine,
            log=log,
            renderer=renderer,
            models=names,
            context_length=engine.context_length,
        )
        server = AppServer(
            build_app(service, log, secret, config.gateway),
            host=config.gateway.host,
            port=config.gateway.port,
            name="gateway",
            port_flag="--gateway.port",
        )
        stack.callback(server.close)
        # Ahead of the server, which waits for its requests: none is left without an answer.
        stack.push_async_callback(engine.close)

        yield endpoint_of(server.url, secret, POLICY)


def _sampler_threads(policy: LocalPolicy) -> int:
    """A small model gains nothing from more threads, and loses much where agents share cores."""
    size = sum(parameter.numel() for parameter in policy.model.parameters())
    return 1 if size < SMALL_MODEL else os.cpu_count() or 1
