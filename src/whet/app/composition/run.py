"""Composition of a run: from its config to store, trainer, engine, gateway and runner.

`open_run` names the steps, once for all ways to run: everything in this process, or only the
training of a distributed run.
"""

import gc
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from anyio import to_thread

from whet.app.composition.distributed import StoreAddress
from whet.app.composition.gateway_pool import serve_in_processes
from whet.app.composition.gateway_server import (
    Gateway,
    count_gateways,
    explain_unread,
    open_collector,
    read_algorithms,
    run_agents,
    serve_gateway,
)
from whet.app.composition.policies import (
    Policies,
    open_followers,
    open_policies,
    open_policy_samplers,
)
from whet.app.composition.ray_runners import run_agents_on_ray
from whet.app.composition.samplers import (
    Sampler,
    build_renderer,
    find_memory_folder,
    open_local_sampler,
    open_tinker_sampler,
)
from whet.app.composition.standalone import serve_judge
from whet.app.composition.trainers import open_algorithm, open_trainer
from whet.app.composition.weight_sync import (
    Publication,
    PublishingTrainer,
    TrainerLease,
    name_policy_resource,
)
from whet.app.inputs import NO_INPUTS, AgentInputs, publish_resources, read_group_rewards
from whet.app.run_folder import RunFolder
from whet.config import RunConfig
from whet.engines.scorer import LocalScorer
from whet.errors import ConfigError
from whet.models.catalog import resolve_model
from whet.models.huggingface import LocalPolicy
from whet.protocols import Algorithm, Collector, Scorer, StepLog, Store, TrainingBackend
from whet.runners.agent import Agent
from whet.runners.attempt import count_processes
from whet.runners.endpoints import Endpoints
from whet.store import DEFAULT_RUN
from whet.store.http.server import StoreServer
from whet.store.sql_store import SQLStore
from whet.training.checkpoints import restore_steps
from whet.training.step import Plan, Update, update_policy
from whet.types import Attempt, Endpoint, Outcome

if TYPE_CHECKING:  # the client takes seconds to import
    from whet.models.tinker import TinkerPolicy

Progress = Callable[[str], None]

PlanGroups = Callable[[Sequence[float | None]], Plan]
"""Plans the groups of a run from the mean rewards of those that it has consumed."""


@dataclass(frozen=True, slots=True)
class Run:
    """The open parts of a run."""

    config: RunConfig
    folder: RunFolder
    store: Store
    steps: StepLog
    """The store's steps, as written by this trainer."""
    collector: Collector
    algorithm: Algorithm
    trainer: TrainingBackend
    update: Update
    """Trains a step on what was collected: the only policy, or each of several."""
    scorer: Scorer | None
    """Scores tokens by the weights being trained; None where a Tinker service has them, or with
    several policies."""
    gateway: Gateway | None
    """None where the gateway is another process."""


@asynccontextmanager
async def open_run(
    folder: RunFolder,
    *,
    agent: Agent | None = None,
    store: Store | None = None,
    algorithm: Algorithm | None = None,
    agent_inputs: AgentInputs = NO_INPUTS,
    on_outcome: Callable[[Attempt, Outcome], None] = lambda attempt, outcome: None,
    on_ended: Callable[[int], None] | None = None,
    plan_groups: PlanGroups | None = None,
    progress: Progress,
) -> AsyncGenerator[Run]:
    """Open the parts of a run, and close them in reverse order.

    With an `agent` everything is in this process. With a `store` only the training is: gateways and
    runners are other processes of that store. `algorithm` replaces the one of the config. With
    `plan_groups` of a training loop, steps whose checkpoint is missing are repeated.
    """
    config = folder.read_config()
    model = resolve_model(config.model, progress=progress)
    async with AsyncExitStack() as stack:
        stack.enter_context(folder.lock())  # first: the folder of another process is not deleted
        stack.callback(folder.discard_if_new)
        lease = await _take_over(folder, store, progress) if store else None
        store = store or await stack.enter_async_context(folder.open_store())
        publication = _build_publication(config, model, folder, store, lease, agent)
        parts = await _open_training_parts(config, model, algorithm, publication, stack, progress)
        judge: Endpoint | None = None
        if agent is not None and config.gateway.judge is not None:
            judge = await stack.enter_async_context(serve_judge(config, progress))
        versions = await _publish_versions(store, agent_inputs, config, publication)
        run = Run(
            config=config,
            folder=folder,
            store=store,
            steps=lease or store,
            collector=open_collector(config, store, versions, agent_inputs.judge, judge, on_ended),
            algorithm=parts.algorithm,
            trainer=parts.trainer,
            update=parts.update,
            scorer=parts.build_scorer(),
            gateway=None,
        )
        # Before sampling: what a kill left in the queue runs as soon as there is a runner.
        await _restore_last(run, plan_groups, progress)
        await run.trainer.publish()
        if agent is not None:
            shared = parts.policy if publication is None else None
            secret = _get_address(folder).secret if config.runner.ray else folder.read_secret()
            serving = _serve_policy(shared, model, folder, store, secret, judge, progress)
            gateway, endpoints = await stack.enter_async_context(serving)
            running = _run_agent(
                agent, folder, store, gateway, endpoints, agent_inputs, on_outcome, progress
            )
            await stack.enter_async_context(running)
            run = replace(run, gateway=gateway)
        folder.keep()
        gc.freeze()  # a model and its libraries: a million objects, visited by every collection
        stack.callback(gc.unfreeze)
        yield run


# ------------------------------------------------------------------- trainer and gateway


class _TrainingParts(NamedTuple):
    """Algorithm and trainer of a run, and the policy or policies they update."""

    policy: "LocalPolicy | TinkerPolicy | Policies"
    algorithm: Algorithm
    trainer: TrainingBackend
    update: Update = update_policy

    def build_scorer(self) -> Scorer | None:
        """Return a scorer by the weights being trained; None where another process has them."""
        return LocalScorer(self.policy) if isinstance(self.policy, LocalPolicy) else None


async def _open_training_parts(
    config: RunConfig,
    model: Path,
    algorithm: Algorithm | None,
    publication: Publication | None,
    stack: AsyncExitStack,
    progress: Progress,
) -> _TrainingParts:
    if config.policies:
        opened = await open_policies(config, algorithm, publication, progress)
        stack.push_async_callback(opened.close)
        return _TrainingParts(opened, opened.algorithm, opened.trainer, opened.update)
    algorithm = algorithm or open_algorithm(config, model, progress=progress)
    trainer, policy = await stack.enter_async_context(open_trainer(config, model))
    if publication is not None:
        trainer = PublishingTrainer(trainer, policy, config, model, publication)
    return _TrainingParts(policy, algorithm, trainer)


def _build_publication(
    config: RunConfig,
    model: Path,
    folder: RunFolder,
    store: Store,
    lease: TrainerLease | None,
    agent: Agent | None,
) -> Publication | None:
    """Build the publication of weights; None if the engine is in this process and shares them.

    They are in memory if all that read them are servers that this process starts.
    """
    if agent is not None and config.engine.kind == "local":
        return None
    weights = folder.weights
    if agent is not None and config.engine.kind == "vllm" and not config.engine.urls:
        memory = find_memory_folder(folder.path, model, config.trained_weights)
        weights = memory / "weights" if memory else weights
    return Publication(store, weights, lease and lease.epoch)


async def _take_over(folder: RunFolder, store: Store, progress: Progress) -> TrainerLease:
    """Become the trainer of a run at a store that other trainers may use.

    A store of the folder's own is locked with it.

    Raises:
        ConfigError: the run was trained in another folder.
    """
    done = await store.steps()
    is_local = any((folder.checkpoints / record.checkpoint).is_dir() for record in done)
    # A kill may come before the first checkpoint is complete.
    if done and not is_local and not await TrainerLease.was_held_in(folder.path, store):
        raise ConfigError(
            f"the run {store.run!r} of the store has {len(done)} steps, but {str(folder.path)!r} "
            f"does not have its checkpoint {done[-1].checkpoint!r}: continue with the dir it was "
            "trained in, or choose another run"
        )
    return await TrainerLease.acquire(store, folder.path, progress)


async def _publish_versions(
    store: Store, agent_inputs: AgentInputs, config: RunConfig, publication: Publication | None
) -> dict[str, int | Literal["latest"]]:
    """Publish resources; returns the versions that attempts request, with those of policies."""
    newest: dict[str, Literal["latest"]] = {}
    if publication is not None:
        newest = {name_policy_resource(name): "latest" for name in config.policies or ("",)}
    return {**newest, **await publish_resources(store, agent_inputs.resources)}


async def _restore_last(run: Run, plan_groups: PlanGroups | None, progress: Progress) -> None:
    """Restore the weights after the last step; with a plan also if its checkpoint is missing."""
    done = await run.store.steps()
    if not done:
        return
    if plan_groups is None:
        await run.trainer.restore(run.folder.checkpoints / done[-1].checkpoint)
        return
    repeated = await restore_steps(
        plan_groups(await read_group_rewards(done, run.store, run.config)),
        run.config,
        checkpoints=run.folder.checkpoints,
        collector=run.collector,
        algorithm=run.algorithm,
        trainer=run.trainer,
        log=run.store,
        update=run.update,
    )
    if repeated:
        progress(f"repeated {repeated} updates since the last checkpoint, from stored rollouts")


@asynccontextmanager
async def _serve_policy(
    shared: "LocalPolicy | TinkerPolicy | Policies | None",
    model: Path,
    folder: RunFolder,
    store: Store,
    secret: bytes,
    judge: Endpoint | None,
    progress: Progress,
) -> AsyncGenerator[tuple[Gateway, Endpoints]]:
    """Serve the policy object that the trainer updates, or servers that load what it publishes.

    The gateway is in this process, or in others that use the engine of this one.
    """
    config = folder.read_config()
    async with AsyncExitStack() as stack:
        prepare = None
        if shared is None:
            opened = open_followers(model, folder, store, _count_training_gpus(config), progress)
            samplers, prepare = await stack.enter_async_context(opened)
        else:
            samplers = await stack.enter_async_context(_open_samplers(shared, model, config))
        if count := count_gateways(config):
            serving = serve_in_processes(
                count, samplers[""], model, folder, store, secret, prepare, judge, progress
            )
            yield await stack.enter_async_context(serving)
            return
        algorithms = read_algorithms(config)
        serving = serve_gateway(
            samplers,
            config,
            store,
            secret,
            prepare=prepare,
            algorithms=lambda: algorithms,
            judge=judge,
            progress=progress,
        )
        gateway = await stack.enter_async_context(serving)
        yield gateway, gateway


def _count_training_gpus(config: RunConfig) -> int:
    """GPUs of this machine that train."""
    if config.trainer.kind != "local" or config.engine.device == "cpu":
        return 0
    return config.trainer.gpus


@asynccontextmanager
async def _open_samplers(
    shared: "LocalPolicy | TinkerPolicy | Policies", model: Path, config: RunConfig
) -> AsyncGenerator[dict[str, Sampler]]:
    """Sample from the weights being trained: by policy, or with an empty name from the only one."""
    if isinstance(shared, Policies):
        async with open_policy_samplers(shared, config) as samplers:
            yield samplers
    elif isinstance(shared, LocalPolicy):
        async with open_local_sampler(shared, config) as sampler:
            yield {"": sampler}
    else:
        async with open_tinker_sampler(shared, build_renderer(model, config)) as sampler:
            yield {"": sampler}


def _run_agent(
    agent: Agent,
    folder: RunFolder,
    store: Store,
    gateway: Gateway,
    endpoints: Endpoints,
    agent_inputs: AgentInputs,
    on_outcome: Callable[[Attempt, Outcome], None],
    progress: Progress,
) -> AbstractAsyncContextManager[None]:
    """Run the agent in this process, or on the Ray cluster of the config."""
    config = folder.read_config().runner
    if others := describe_processes(agent, folder.read_config()):
        progress(others)
    if config.ray is not None:
        return _run_on_ray(agent, folder, store, gateway, progress)
    return run_agents(
        agent,
        config,
        store,
        endpoints,
        on_outcome,
        hooks=agent_inputs.hooks,
        explain_unread=partial(explain_unread, read_algorithms(folder.read_config())),
        on_warning=progress,
    )


def describe_processes(agent: Agent, config: RunConfig) -> str | None:
    """One line about what runs in other processes of this machine; None if nothing does."""
    agents = 0 if config.runner.ray else count_processes(agent, config.runner)
    counts = {"agents": agents, "the gateway": count_gateways(config)}
    if not any(counts.values()):
        return None
    others = ", ".join(f"{count} for {what}" for what, count in counts.items() if count)
    return f"other processes: {others}; --runner.processes 0 runs all in this one"


@asynccontextmanager
async def _run_on_ray(
    agent: Agent, folder: RunFolder, store: Store, gateway: Gateway, progress: Progress
) -> AsyncGenerator[None]:
    """Serve the run's own store to runners on a Ray cluster, and run the agent there."""
    assert isinstance(store, SQLStore)
    config, address = folder.read_config(), _get_address(folder)
    server = StoreServer(store, token=address.token, host=config.gateway.host)
    try:
        async with run_agents_on_ray(
            agent,
            config.runner,
            store,
            address._replace(url=server.url),
            gateway=gateway.url,
            progress=progress,
        ):
            yield
    finally:
        await to_thread.run_sync(server.close)


def _get_address(folder: RunFolder) -> StoreAddress:
    """The run in its own store, without a URL; runners derive their keys from its token."""
    return StoreAddress("", DEFAULT_RUN, folder.read_secret().hex())
