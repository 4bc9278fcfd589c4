"""Config to objects: everything of a run in one process, or its parts in several."""

import os
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from whet.app.credit import open_algorithm
from whet.app.folder import RunFolder
from whet.app.given import Surroundings, published
from whet.app.local_sampler import local_sampler
from whet.app.published import PolicyFollower, PublishingTrainer, TrainedPolicy, read_policy
from whet.app.sampler import serve, served_sampler
from whet.app.working import Gateway, agents_at_work
from whet.config import RunConfig
from whet.engines.scorer import LocalScorer
from whet.errors import MissingExtra
from whet.policies.catalogue import resolve_model
from whet.policies.local import LocalPolicy
from whet.protocols import Algorithm, Collector, Scorer, StepLog, Store, Trainer
from whet.runners.agent import Agent
from whet.runners.collect import QueueCollector
from whet.runners.execution import check_runnable
from whet.runners.given import POLICY
from whet.store.sqlite import SQLiteStore
from whet.trainers.local import LocalTrainer
from whet.types import Attempt, Endpoint, Outcome

if TYPE_CHECKING:  # its client takes seconds to import
    from whet.policies.tinker import TinkerPolicy

NOTHING = Surroundings()


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run, at work."""

    config: RunConfig
    folder: RunFolder
    store: Store
    collector: Collector
    algorithm: Algorithm
    trainer: Trainer
    scorer: Scorer | None = None
    """Of the weights as they are trained; None where a Tinker service has them."""
    gateway: Endpoint | None = None
    """For calls that are of no attempt; None where the gateway is elsewhere."""


@asynccontextmanager
async def open_run(
    agent: Agent,
    folder: RunFolder,
    *,
    algorithm: Algorithm | None = None,
    surroundings: Surroundings = NOTHING,
    on_outcome: Callable[[Attempt, Outcome], None],
    progress: Callable[[str], None],
) -> AsyncGenerator[Run]:
    """Start store, engine, gateway and runner; stop them in turn when done.

    An `algorithm` that is given stands for the config's. Every rollout gets the resources.
    """
    config = folder.config()
    check_runnable(agent, config.runner)
    model = resolve_model(config.model, progress=progress)
    algorithm = algorithm or open_algorithm(config, model, progress=progress)
    async with AsyncExitStack() as stack:
        stack.enter_context(folder.owned())
        store = await stack.enter_async_context(SQLiteStore(folder.store))
        # This process owns the run, so whoever held a lease before is dead.
        await store.release_workers()
        is_served = config.engine.kind != "local"
        if config.trainer.kind == "tinker":
            trainer, policy = await _at_tinker(config)
            serving = _serve_tinker(policy, model, config, store, folder, progress)
        else:
            trainer, policy = _here(model, config)
            serving = _serve_here(policy, config, store, folder, progress)
            if is_served:
                trainer = _publishing(trainer, policy, folder, model, store)
                serving = _serve_elsewhere(model, config, store, folder, progress)
        # Before anybody samples: what a kill left in the queue runs as soon as there is a runner.
        await _restore_last(trainer, folder, store)
        await trainer.publish()
        gateway = await stack.enter_async_context(serving)
        given = await published(store, surroundings.resources)
        # Servers have copies of the weights: rollouts say which they are to be sampled from.
        sampled_from: dict[str, Literal["latest"]] = {POLICY: "latest"} if is_served else {}
        run = Run(
            config=config,
            folder=folder,
            store=store,
            collector=QueueCollector(queue=store, log=store, resources={**sampled_from, **given}),
            algorithm=algorithm,
            trainer=trainer,
            scorer=_scorer(policy),
            gateway=gateway.own_endpoint,
        )
        async with agents_at_work(
            agent,
            config.runner,
            store,
            gateway.endpoint,
            on_outcome,
            hooks=surroundings.hooks,
            note=progress,
        ):
            yield run


@asynccontextmanager
async def open_training(
    folder: RunFolder,
    store: Store,
    *,
    algorithm: Algorithm | None = None,
    surroundings: Surroundings = NOTHING,
    on_ended: Callable[[int], None],
    progress: Callable[[str], None],
) -> AsyncGenerator[Run]:
    """The part of a run that trains; gateways and runners are other processes of the store."""
    config = folder.config()
    model = resolve_model(config.model, progress=progress)
    algorithm = algorithm or open_algorithm(config, model, progress=progress)
    with folder.owned():
        is_tinker = config.trainer.kind == "tinker"
        trainer, policy = await _at_tinker(config) if is_tinker else _here(model, config)
        trainer = _publishing(trainer, policy, folder, model, store)
        await _restore_last(trainer, folder, store)
        await trainer.publish()
        given = await published(store, surroundings.resources)
        yield Run(
            config=config,
            folder=folder,
            store=store,
            collector=QueueCollector(
                queue=store, log=store, resources={POLICY: "latest", **given}, on_ended=on_ended
            ),
            algorithm=algorithm,
            trainer=trainer,
            scorer=_scorer(policy),
        )


def _here(model: Path, config: RunConfig) -> tuple[Trainer, LocalPolicy]:
    policy = LocalPolicy(model, config.trainer, device=config.engine.device, seed=config.seed)
    return LocalTrainer(policy, threads=os.cpu_count()), policy


def _scorer(policy: TrainedPolicy) -> Scorer | None:
    return LocalScorer(policy) if isinstance(policy, LocalPolicy) else None


async def _at_tinker(config: RunConfig) -> tuple[Trainer, "TinkerPolicy"]:
    try:
        from whet.policies.tinker import TinkerPolicy  # noqa: PLC0415 - only if needed
        from whet.trainers.tinker import TinkerTrainer  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise MissingExtra.of(f"trainer.kind 'tinker' ({error})", "tinker") from error
    policy = await TinkerPolicy.open(config)
    return TinkerTrainer(policy), policy


async def _restore_last(trainer: Trainer, folder: RunFolder, log: StepLog) -> None:
    if done := await log.steps():
        await trainer.restore(folder.checkpoints / done[-1].checkpoint)


def _publishing(
    trainer: Trainer, policy: TrainedPolicy, folder: RunFolder, model: Path, store: Store
) -> Trainer:
    return PublishingTrainer(
        trainer, policy, folder.config(), model=model, resources=store, folder=folder.weights
    )


@asynccontextmanager
async def _serve_here(
    policy: LocalPolicy,
    config: RunConfig,
    store: Store,
    folder: RunFolder,
    progress: Callable[[str], None],
) -> AsyncGenerator[Gateway]:
    async with (
        local_sampler(policy, config) as sampler,
        serve(sampler, config, store, folder.secret(), say=progress) as gateway,
    ):
        yield gateway


def _serve_tinker(
    policy: "TinkerPolicy",
    model: Path,
    config: RunConfig,
    store: Store,
    folder: RunFolder,
    progress: Callable[[str], None],
) -> AbstractAsyncContextManager[Gateway]:
    from whet.app.tinker_sampler import sampler_of  # noqa: PLC0415 - only if needed

    return serve(sampler_of(policy, model, config), config, store, folder.secret(), say=progress)


@asynccontextmanager
async def _serve_elsewhere(
    model: Path,
    config: RunConfig,
    store: Store,
    folder: RunFolder,
    progress: Callable[[str], None],
) -> AsyncGenerator[Gateway]:
    published = read_policy(await store.latest(POLICY))
    serving = served_sampler(model, published, config, place=folder.path, say=progress)
    async with serving as sampler:
        follower = PolicyFollower(sampler.weights, published, store)
        await follower.load_newest()
        prepared = serve(
            sampler, config, store, folder.secret(), prepare=follower.prepare, say=progress
        )
        async with prepared as gateway:
            yield gateway
