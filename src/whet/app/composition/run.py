"""Composition of a run: from its config to store, trainer, engine, gateway and runner.

`open_run` names the steps, once for all ways to run: everything in this process, or only the
training of a distributed run. `serve_model` serves a model that nothing trains.
"""

import gc
import secrets
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from anyio import to_thread
from pydantic import JsonValue

from whet.app.composition.distributed import StoreAddress
from whet.app.composition.gateway_pool import serve_in_processes
from whet.app.composition.gateway_server import (
    Gateway,
    check_own_process,
    count_gateways,
    open_collector,
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
    local_sampler,
    open_model_samplers,
    tinker_sampler,
    weights_in_memory,
)
from whet.app.composition.trainers import open_algorithm, open_trainer
from whet.app.composition.weight_sync import (
    Publication,
    TrainerLease,
    policy_resource,
)
from whet.app.evaluation.models import (
    EndpointModel,
    LocalModel,
    PolicySet,
    find_run,
    read_models,
)
from whet.app.inputs import NO_CONTEXT, AgentContext, check_one_policy, publish_resources
from whet.app.run_folder import RunFolder
from whet.config import AlgorithmConfig, GatewayConfig, LocalEngineConfig, RunConfig, resolve
from whet.engines.scorer import LocalScorer
from whet.errors import ConfigError
from whet.gateway.pipeline import Log
from whet.models.catalog import resolve_model
from whet.models.huggingface import LocalPolicy
from whet.protocols import Algorithm, Collector, Scorer, StepLog, Store, TrainingBackend
from whet.runners.agent import Agent
from whet.runners.attempt import count_processes
from whet.runners.endpoints import Endpoints
from whet.store import DEFAULT_RUN
from whet.store.http.server import StoreServer
from whet.store.sql_store import SQLStore
from whet.store.sqlite import SQLiteStore
from whet.training.checkpoints import restore_steps
from whet.training.step import Plan, Update, update_policy
from whet.types import Attempt, Endpoint, Outcome

if TYPE_CHECKING:  # the client takes seconds to import
    from whet.models.tinker import TinkerPolicy

Progress = Callable[[str], None]

BASE_MODEL = "base"
"""`gateway.judge`: the model of the run before training."""


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
    context: AgentContext = NO_CONTEXT,
    on_outcome: Callable[[Attempt, Outcome], None] = lambda attempt, outcome: None,
    on_ended: Callable[[int], None] | None = None,
    plan: Plan | None = None,
    progress: Progress,
) -> AsyncGenerator[Run]:
    """Open the parts of a run, and close them in reverse order.

    With an `agent` everything is in this process. With a `store` only the training is: gateways and
    runners are other processes of that store. `algorithm` replaces the one of the config. With the
    `plan` of a training loop, steps whose checkpoint is missing are repeated.
    """
    config = folder.config()
    model = resolve_model(config.model, progress=progress)
    async with AsyncExitStack() as stack:
        stack.callback(folder.discard_if_new)
        stack.enter_context(folder.owned())
        lease = await _take_over(folder, store, progress) if store else None
        store = store or await stack.enter_async_context(folder.open_store())
        # An engine of this process shares the weights being trained; any other loads a copy.
        shares_weights = agent is not None and config.engine.kind == "local"
        epoch = lease and lease.epoch
        publication = None
        if not shares_weights:
            weights = _choose_weights_folder(config, model, folder, has_agent=agent is not None)
            publication = Publication(store, weights, epoch)
        opening = _open_learning(config, model, algorithm, publication, stack, progress)
        policy, learned_by, trainer, update = await opening
        serving = serve_judge(config if agent else None, progress)
        judge = await stack.enter_async_context(serving)
        versions = await _publish_versions(store, context, config, publication)
        collector = open_collector(config, store, versions, context.judge, judge, on_ended)
        scorer = LocalScorer(policy) if isinstance(policy, LocalPolicy) else None
        parts = collector, learned_by, trainer, update, scorer
        run = Run(config, folder, store, lease or store, *parts, gateway=None)
        # Before sampling: what a kill left in the queue runs as soon as there is a runner.
        await _restore_last(run, plan, progress)
        await trainer.publish()
        if agent is not None:
            shared = policy if shares_weights else None
            secret = _describe_store(folder, "").secret if config.runner.ray else folder.secret()
            serving = _serve_policy(shared, model, folder, store, secret, judge, progress)
            gateway, endpoints = await stack.enter_async_context(serving)
            placed = agent, folder, store, gateway, endpoints
            running = _run_agent(*placed, context, on_outcome, progress)
            await stack.enter_async_context(running)
            run = replace(run, gateway=gateway)
        folder.keep()
        gc.freeze()  # a model and its libraries: a million objects, visited by every collection
        stack.callback(gc.unfreeze)
        yield run


@asynccontextmanager
async def serve_model(
    model: LocalModel | PolicySet,
    config: RunConfig,
    log: Log,
    secret: bytes,
    folder: Path,
    judge: Endpoint | None = None,
) -> AsyncGenerator[Gateway]:
    """Serve a model, adapter or checkpoint that nothing trains; `folder` is for its servers.

    With policies in the config each is served by its name: those of a set, or all by one model.

    Raises:
        ConfigError: the config asks for gateways in other processes.
    """
    check_own_process(config)
    if isinstance(model, PolicySet):
        models = model.models
    else:
        models = dict.fromkeys(config.policies or ("",), model)
    async with (
        open_model_samplers(models, config, folder) as samplers,
        serve_gateway(samplers, config, log, secret, judge=judge) as gateway,
    ):
        yield gateway


@asynccontextmanager
async def serve_alone(
    source: str, config: RunConfig, progress: Progress
) -> AsyncGenerator[Gateway]:
    """Serve a model, a run, an adapter or a checkpoint to any client; nothing is recorded.

    Each of several policies is served by its name. The key of a run's model stays the same.

    Raises:
        ConfigError: the model is unknown, or cannot be loaded.
    """
    async with _serve_found(*_find_served(source, config.dir, progress), config) as gateway:
        yield gateway


@asynccontextmanager
async def serve_one(
    source: str, config: RunConfig, progress: Progress, policy: str | None = None
) -> AsyncGenerator[Gateway]:
    """Serve a model as `serve_alone` does, or one policy of a run of several.

    Raises:
        ConfigError: the model or the policy is unknown, or cannot be loaded.
    """
    found, secret = _find_served(source, config.dir, progress)
    if isinstance(found, PolicySet):
        found = found.choose(policy)
    elif policy is not None:
        raise ConfigError(f"{source!r} has only one policy: leave out {policy!r}")
    async with _serve_found(found, secret, config) as gateway:
        yield gateway


@asynccontextmanager
async def serve_judge(
    config: RunConfig | None, progress: Progress
) -> AsyncGenerator[Endpoint | None]:
    """Serve the model that `gateway.judge` names, if it names one, beside the policy."""
    if config is None or config.gateway.judge is None:
        yield None
        return
    source = config.model if config.gateway.judge == BASE_MODEL else config.gateway.judge
    engine = config.engine if config.engine.kind == "local" else LocalEngineConfig()
    update: dict[str, object] = {"engine": engine, "gateway": GatewayConfig(), "policies": {}}
    async with serve_one(source, config.model_copy(update=update), progress) as gateway:
        yield gateway.own_endpoint.model_copy(update={"model": gateway.model})


def _find_served(
    source: str, directory: Path, progress: Progress
) -> tuple[LocalModel | PolicySet, bytes]:
    """A model by what `whet eval` takes, or by the name of a run, and the secret of its keys."""
    [model] = read_models([source], None, progress, directory=directory)
    assert not isinstance(model, EndpointModel)
    run = find_run(Path(model.source).expanduser())
    return model, run.secret() if run else secrets.token_bytes(32)


@asynccontextmanager
async def _serve_found(
    model: LocalModel | PolicySet, secret: bytes, config: RunConfig
) -> AsyncGenerator[Gateway]:
    check_one_policy(config, "serving a model")
    gateway: dict[str, object] = {"allow_unattributed": True}
    if isinstance(model, PolicySet):
        policies: dict[str, JsonValue] = {
            name: {"models": list(section.models)} for name, section in model.policies.items()
        }
        config = resolve({**config.model_dump(mode="json"), "policies": policies})
    else:
        gateway["models"] = (*config.gateway.models, model.name)
    config = config.model_copy(update={"gateway": config.gateway.model_copy(update=gateway)})
    with tempfile.TemporaryDirectory() as folder:
        async with (
            SQLiteStore(Path(folder) / "store.db") as log,
            serve_model(model, config, log, secret, Path(folder)) as served,
        ):
            yield served if served.policies else replace(served, model=model.name)


# ------------------------------------------------------------------- trainer and gateway


class _Learning(NamedTuple):
    """Algorithm and trainer of a run, and the policy or policies they update."""

    policy: "LocalPolicy | TinkerPolicy | Policies"
    algorithm: Algorithm
    trainer: TrainingBackend
    update: Update = update_policy


async def _open_learning(
    config: RunConfig,
    model: Path,
    algorithm: Algorithm | None,
    publication: Publication | None,
    stack: AsyncExitStack,
    progress: Progress,
) -> _Learning:
    if config.policies:
        opened = await open_policies(config, algorithm, publication, progress)
        return _Learning(opened, opened.algorithm, opened.trainer, opened.update)
    algorithm = algorithm or open_algorithm(config, model, progress=progress)
    trainer, policy = await stack.enter_async_context(open_trainer(config, model))
    if publication is not None:
        trainer = publication.wrap(trainer, policy, config, model)
    return _Learning(policy, algorithm, trainer)


def _choose_weights_folder(
    config: RunConfig, model: Path, folder: RunFolder, *, has_agent: bool
) -> Path:
    """The folder of published weights: in memory, if all that read them are of this machine."""
    starts_servers = has_agent and config.engine.kind == "vllm" and not config.engine.urls
    weights = config.trained_weights
    memory = weights_in_memory(folder.path, model, weights) if starts_servers else None
    return memory / "weights" if memory else folder.weights


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
            f"does not have its checkpoint {done[-1].checkpoint!r}: continue with the --dir it was "
            "trained in, or choose another --run"
        )
    return await TrainerLease.acquire(store, folder.path, progress)


async def _publish_versions(
    store: Store, context: AgentContext, config: RunConfig, publication: Publication | None
) -> dict[str, int | Literal["latest"]]:
    """Publish the resources of attempts, which also wait for the newest policies."""
    newest: dict[str, Literal["latest"]] = {}
    if publication is not None:
        newest = {policy_resource(name): "latest" for name in config.policies or ("",)}
    return {**newest, **await publish_resources(store, context.resources)}


async def _restore_last(run: Run, plan: Plan | None, progress: Progress) -> None:
    """Restore the weights after the last step: its checkpoint, or with a plan what leads to it."""
    done = await run.store.steps()
    if not done:
        return
    if plan is None:
        await run.trainer.restore(run.folder.checkpoints / done[-1].checkpoint)
        return
    repeated = await restore_steps(
        plan,
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
    config = folder.config()
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
        async with local_sampler(shared, config) as sampler:
            yield {"": sampler}
    else:
        async with tinker_sampler(shared, build_renderer(model, config)) as sampler:
            yield {"": sampler}


def _run_agent(
    agent: Agent,
    folder: RunFolder,
    store: Store,
    gateway: Gateway,
    endpoints: Endpoints,
    context: AgentContext,
    on_outcome: Callable[[Attempt, Outcome], None],
    progress: Progress,
) -> AbstractAsyncContextManager[None]:
    """Run the agent in this process, or on the Ray cluster of the config."""
    config = folder.config().runner
    if others := describe_processes(agent, folder.config()):
        progress(others)
    if config.ray is not None:
        return _run_on_ray(agent, folder, store, gateway, progress)
    return run_agents(
        agent,
        config,
        store,
        endpoints,
        on_outcome,
        hooks=context.hooks,
        algorithms=read_algorithms(folder.config()),
        on_warning=progress,
    )


def read_algorithms(config: RunConfig) -> list[AlgorithmConfig]:
    """The settings of the algorithms of every trained policy."""
    return [config.for_policy(name).algorithm for name in config.trained_policies]


def describe_processes(agent: Agent, config: RunConfig) -> str | None:
    """One line about what runs in other processes of this machine; None if nothing does."""
    agents = 0 if config.runner.ray else count_processes(agent, config.runner)
    counts = {"agents": agents, "the gateway": count_gateways(config)}
    if not any(counts.values()):
        return None
    others = ", ".join(f"{count} for {what}" for what, count in counts.items() if count)
    return f"further processes: {others}; --runner.processes 0 runs all in this one"


@asynccontextmanager
async def _run_on_ray(
    agent: Agent, folder: RunFolder, store: Store, gateway: Gateway, progress: Progress
) -> AsyncGenerator[None]:
    """Serve the run's own store to runners on a Ray cluster, and run the agent there."""
    assert isinstance(store, SQLStore)
    config, place = folder.config(), _describe_store(folder, "")
    server = StoreServer(store, token=place.token, host=config.gateway.host)
    try:
        async with run_agents_on_ray(
            agent,
            config.runner,
            store,
            place._replace(url=server.url),
            gateway=gateway.url,
            report=progress,
        ):
            yield
    finally:
        await to_thread.run_sync(server.close)


def _describe_store(folder: RunFolder, url: str) -> StoreAddress:
    """The run in its own store as other processes see it; runners derive their keys from this."""
    return StoreAddress(url, DEFAULT_RUN, folder.secret().hex())
