"""Config to objects: everything of a run in one process."""

import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from anyio import create_task_group

from whet.algorithms.grpo import GRPO
from whet.app.folder import RunFolder
from whet.config import RunConfig
from whet.engines.local import LocalEngine
from whet.gateway import keys
from whet.gateway.app import build_app
from whet.gateway.render import Renderer
from whet.gateway.server import GatewayServer
from whet.gateway.service import Service
from whet.gateway.template import ChatTemplate
from whet.policies.catalogue import resolve_model
from whet.policies.local import LocalPolicy
from whet.protocols import Algorithm, Collector, Trainer
from whet.runners.agent import Agent, check_agent
from whet.runners.collect import QueueCollector
from whet.runners.local import LocalRunner
from whet.store.sqlite import SQLiteStore
from whet.trainers.local import LocalTrainer
from whet.types import Attempt, Endpoint, Outcome

POLICY = "policy"
"""The name agents see as their model."""


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
    with folder.owned():
        async with SQLiteStore(folder.store) as store:
            # This process owns the run, so whoever held a lease before is dead.
            await store.release_workers()
            template = ChatTemplate(model)
            policy = LocalPolicy(
                model, config.trainer, device=config.engine.device, seed=config.seed
            )
            cores = os.cpu_count() or 1
            engine = LocalEngine(policy, config.engine, template.decode, threads=cores)
            service = Service(
                engine=engine, log=store, renderer=Renderer(template), policy=POLICY
            )
            secret = folder.secret()
            server = GatewayServer(build_app(service, store, secret), config.gateway)

            def endpoint(attempt: Attempt) -> Endpoint:
                path = f"/rollout/{attempt.rollout.id}/attempt/{attempt.id}/v1"
                key = keys.mint(attempt.id, secret)
                return Endpoint(base_url=server.url + path, api_key=key, model=POLICY)

            runner = LocalRunner(
                agent,
                config.runner,
                queue=store,
                log=store,
                endpoint=endpoint,
                on_outcome=on_outcome,
            )
            try:
                async with create_task_group() as tasks:
                    tasks.start_soon(runner.run)
                    yield Run(
                        config=config,
                        folder=folder,
                        store=store,
                        collector=QueueCollector(queue=store, log=store),
                        algorithm=GRPO(config.algorithm),
                        trainer=LocalTrainer(policy, threads=cores),
                    )
                    tasks.cancel_scope.cancel()
            finally:
                await engine.close()
                server.close()
