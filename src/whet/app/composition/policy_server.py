"""Serve the policy of a run to its agents: engine, and gateway in this process or in others."""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from whet.app.composition.gateway_pool import GatewaySettings, open_gateway_pool
from whet.app.composition.gateway_server import Gateway, count_gateways, serve_gateway
from whet.app.composition.policies import Policies, open_policy_samplers
from whet.app.composition.samplers import Sampler, local_sampler, open_sampler, tinker_sampler
from whet.app.composition.weight_sync import PolicyFollower, read_policy
from whet.app.run_folder import RunFolder
from whet.config import RunConfig
from whet.engines.socket_engine import EngineServer
from whet.models.huggingface import LocalPolicy
from whet.protocols import Store
from whet.runners.agent import POLICY
from whet.runners.endpoints import Endpoints, FixedEndpoint
from whet.types import Attempt, Endpoint

if TYPE_CHECKING:  # the client takes seconds to import
    from whet.models.tinker import TinkerPolicy

Progress = Callable[[str], None]


@asynccontextmanager
async def serve_policy(
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
            published = read_policy(await store.latest(POLICY))
            opened = open_sampler(model, published, config, folder=folder.path, progress=progress)
            sampler = await stack.enter_async_context(opened)
            samplers = {"": sampler}
            follower = PolicyFollower(sampler.weights, published, store)
            await follower.load_newest()
            prepare = follower.prepare
        else:
            samplers = await stack.enter_async_context(_open_samplers(shared, model, config))
        if count := count_gateways(config):
            serving = _serve_in_processes(
                count, samplers[""], model, folder, store, secret, prepare, judge, progress
            )
            yield await stack.enter_async_context(serving)
            return
        algorithms = [config.for_policy(name).algorithm for name in config.trained_policies]
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
        yield gateway, FixedEndpoint(gateway.endpoint)


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
        async with tinker_sampler(shared, model, config) as sampler:
            yield {"": sampler}


@asynccontextmanager
async def _serve_in_processes(
    count: int,
    sampler: Sampler,
    model: Path,
    folder: RunFolder,
    store: Store,
    secret: bytes,
    prepare: Callable[[Attempt], Awaitable[None]] | None,
    judge: Endpoint | None,
    progress: Progress,
) -> AsyncGenerator[tuple[Gateway, Endpoints]]:
    """Serve an engine of this process by gateways in others."""
    server = EngineServer(sampler.engine, prepare)
    settings = GatewaySettings(
        config=folder.config(),
        model=model,
        context_length=sampler.context_length,
        secret=secret.hex(),
        store=folder.store,
        run=store.run,
        judge=judge,
        prepares=prepare is not None,
        log_level=logging.getLogger("whet").getEffectiveLevel(),
    )
    try:
        async with open_gateway_pool(count, settings, server, store, progress) as served:
            yield served
    finally:
        await server.close()
