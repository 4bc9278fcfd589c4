"""Config to objects: everything of a run in one process, or its parts in several."""

import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from whet.app.credit import open_algorithm
from whet.app.folder import RunFolder
from whet.app.published import PublishingTrainer
from whet.app.working import POLICY, Gateway, agents_at_work
from whet.config import RunConfig
from whet.engines.grammar import Grammars
from whet.engines.local import LocalEngine
from whet.gateway.app import build_app
from whet.gateway.render import Renderer
from whet.gateway.service import Log, Service
from whet.gateway.template import ChatTemplate
from whet.policies.catalogue import resolve_model
from whet.policies.local import LocalPolicy
from whet.protocols import Algorithm, Collector, StepLog, Store, Trainer
from whet.runners.agent import Agent, check_agent
from whet.runners.collect import QueueCollector
from whet.serving import AppServer
from whet.store.sqlite import SQLiteStore
from whet.trainers.local import LocalTrainer
from whet.types import Attempt, Endpoint, Outcome

SMALL_MODEL = 20_000_000
"""Parameters up to which one thread samples fastest."""


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run, at work."""

    config: RunConfig
    folder: RunFolder
    store: Store
    collector: Collector
    algorithm: Algorithm
    trainer: Trainer
    gateway: Endpoint | None = None
    """For calls that are of no attempt; None where the gateway is elsewhere."""


@asynccontextmanager
async def open_run(
    agent: Agent,
    folder: RunFolder,
    *,
    algorithm: Algorithm | None = None,
    on_outcome: Callable[[Attempt, Outcome], None],
    progress: Callable[[str], None],
) -> AsyncGenerator[Run]:
    """Start store, engine, gateway and runner; stop them in turn when done.

    An `algorithm` that is given stands for the one the config names.
    """
    check_agent(agent)
    config = folder.config()
    model = resolve_model(config.model, progress=progress)
    algorithm = algorithm or open_algorithm(config, model, progress=progress)
    async with AsyncExitStack() as stack:
        stack.enter_context(folder.owned())
        store = await stack.enter_async_context(SQLiteStore(folder.store))
        # This process owns the run, so whoever held a lease before is dead.
        await store.release_workers()
        policy = LocalPolicy(model, config.trainer, device=config.engine.device, seed=config.seed)
        trainer = LocalTrainer(policy, threads=os.cpu_count())
        # Before anybody samples: what a kill left in the queue runs as soon as there is a runner.
        await _restore_last(trainer, folder, store)
        serving = serve(policy, config, store, folder.secret())
        gateway = await stack.enter_async_context(serving)
        run = Run(
            config=config,
            folder=folder,
            store=store,
            collector=QueueCollector(queue=store, log=store),
            algorithm=algorithm,
            trainer=trainer,
            gateway=gateway.own_endpoint,
        )
        async with agents_at_work(agent, config.runner, store, gateway.endpoint, on_outcome):
            yield run


@asynccontextmanager
async def open_training(
    folder: RunFolder,
    store: Store,
    *,
    algorithm: Algorithm | None = None,
    on_ended: Callable[[int], None],
    progress: Callable[[str], None],
) -> AsyncGenerator[Run]:
    """The part of a run that trains; gateways and runners are other processes of the store."""
    config = folder.config()
    model = resolve_model(config.model, progress=progress)
    algorithm = algorithm or open_algorithm(config, model, progress=progress)
    with folder.owned():
        policy = LocalPolicy(model, config.trainer, device=config.engine.device, seed=config.seed)
        trainer = PublishingTrainer(
            LocalTrainer(policy, threads=os.cpu_count()),
            policy,
            config,
            model=model,
            resources=store,
            folder=folder.weights,
        )
        await _restore_last(trainer, folder, store)
        await trainer.publish()
        yield Run(
            config=config,
            folder=folder,
            store=store,
            collector=QueueCollector(
                queue=store, log=store, resources={POLICY: "latest"}, on_ended=on_ended
            ),
            algorithm=algorithm,
            trainer=trainer,
        )


async def _restore_last(trainer: Trainer, folder: RunFolder, log: StepLog) -> None:
    if done := await log.steps():
        await trainer.restore(folder.checkpoints / done[-1].checkpoint)


@asynccontextmanager
async def serve(
    policy: LocalPolicy,
    config: RunConfig,
    log: Log,
    secret: bytes,
    *,
    prepare: Callable[[Attempt], Awaitable[None]] | None = None,
) -> AsyncGenerator[Gateway]:
    """Engine and gateway at work."""
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
            prepare=prepare,
        )
        server = AppServer(
            build_app(service, secret, config.gateway),
            host=config.gateway.host,
            port=config.gateway.port,
            name="gateway",
            port_flag="--gateway.port",
        )
        stack.callback(server.close)
        # Ahead of the server, which waits for its requests: none is left without an answer.
        stack.push_async_callback(engine.close)
        yield Gateway(server.url, secret, POLICY)


def _sampler_threads(policy: LocalPolicy) -> int:
    """A small model gains nothing from more threads, and loses much where agents share cores."""
    size = sum(parameter.numel() for parameter in policy.model.parameters())
    return 1 if size < SMALL_MODEL else os.cpu_count() or 1
