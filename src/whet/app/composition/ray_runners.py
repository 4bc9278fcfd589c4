"""Runners of a run on a Ray cluster: `whet runner --ray`, and `runner.ray` of a training run.

How many there are is a resource in the store, so that any process may change it.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

import anyio
from anyio import create_task_group

from whet.app.composition.distributed import (
    STORE_VARIABLE,
    StoreAddress,
    connect_store,
    watch_workers,
)
from whet.config import RunnerConfig
from whet.errors import ConfigError, NotFound
from whet.io.http_client import is_loopback
from whet.io.text import hide_passwords
from whet.protocols import Resources, Store
from whet.runners.agent import Agent
from whet.runners.loading import get_spec
from whet.runners.ray_pool import (
    RunnerPool,
    connect_ray,
    find_own_address,
    list_node_addresses,
    open_pool,
)
from whet.store.http import token
from whet.types import RUNNERS_PREFIX

DEFAULT_NAME = "ray"
GRACE_S = 20.0
SCALE_POLL_S = 1.0
ANY_HOST = ("0.0.0.0", "::")


class PoolSettings(NamedTuple):
    """A pool of runners on a cluster."""

    ray: str
    num: int
    cpus: float
    name: str = DEFAULT_NAME
    grace_s: float = GRACE_S


async def set_runners(store: Resources, name: str, num: int) -> None:
    """Set how many runners a pool has; it follows within seconds."""
    await store.publish(RUNNERS_PREFIX + name, {"num": num})


async def run_pool(
    settings: PoolSettings,
    address: StoreAddress,
    arguments: Sequence[str],
    *,
    gateway: str | None,
    stop: anyio.Event,
    progress: Callable[[str], None],
) -> None:
    """Run a pool for the run of a store until `stop` is set: `whet runner --ray`."""
    async with (
        connect_store(address) as store,
        _open_pool(settings, address, arguments, gateway, progress) as pool,
    ):
        await set_runners(store, settings.name, settings.num)
        progress(
            f"{settings.num} runners on Ray at {settings.ray} join run {address.run} of "
            f"{address.shown_url}"
        )
        async with create_task_group() as tasks:
            tasks.start_soon(_follow_size, pool, store, settings.name, progress)
            await stop.wait()
            progress(f"{pool.size} runners stop: their attempts have {settings.grace_s:g} s")
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def run_agents_on_ray(
    agent: Agent,
    config: RunnerConfig,
    store: Store,
    address: StoreAddress,
    *,
    gateway: str | None = None,
    progress: Callable[[str], None],
) -> AsyncGenerator[None]:
    """Run the agent on a cluster while the block runs, on the rollouts of a store.

    Without the URL of a `gateway` the runners find those of the store.

    Raises:
        ConfigError: the agent has no name to be imported by, or there is no cluster.
    """
    assert config.ray is not None
    settings = PoolSettings(config.ray, config.ray_runners, config.ray_cpus)
    arguments = [*_list_arguments(config), get_spec(agent)]
    async with _open_pool(settings, address, arguments, gateway, progress) as pool:
        await set_runners(store, settings.name, settings.num)
        async with create_task_group() as tasks, watch_workers(store, progress):
            tasks.start_soon(_follow_size, pool, store, settings.name, progress)
            yield
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def _open_pool(
    settings: PoolSettings,
    address: StoreAddress,
    arguments: Sequence[str],
    gateway: str | None,
    progress: Callable[[str], None],
) -> AsyncGenerator[RunnerPool]:
    async with connect_ray(settings.ray):
        flags = ["--run", address.run]
        if gateway is not None:
            flags += ["--gateway", _make_reachable(gateway)]
        async with open_pool(
            [*flags, *arguments],
            {token.VARIABLE: address.token, STORE_VARIABLE: _make_reachable(address.url)},
            name=settings.name,
            cpus=settings.cpus,
            grace_s=settings.grace_s,
            progress=progress,
        ) as pool:
            yield pool


def _make_reachable(address: str) -> str:
    """An address as the cluster's nodes reach it.

    Raises:
        ConfigError: it names this machine alone, and the cluster has others.
    """
    url = urlsplit(address)
    if not url.hostname:
        return address
    own = find_own_address()
    if url.hostname in ANY_HOST:
        return urlunsplit(url._replace(netloc=f"{own}:{url.port}"))
    others = list_node_addresses() - {own, "127.0.0.1"}
    if is_loopback(url.hostname) and others:
        raise ConfigError(
            f"{hide_passwords(address)} is this machine alone, and the cluster has nodes at "
            f"{', '.join(sorted(others))}: let the store and the gateway listen on an address that "
            "they reach, such as gateway.host 0.0.0.0"
        )
    return address


async def _follow_size(
    pool: RunnerPool, store: Resources, name: str, progress: Callable[[str], None]
) -> None:
    while True:
        if (wanted := await _read_size(store, name)) not in (None, pool.size):
            if pool.size:
                progress(f"scaling from {pool.size} to {wanted} runners")
            await pool.scale(wanted)
        await anyio.sleep(SCALE_POLL_S)


async def _read_size(store: Resources, name: str) -> int | None:
    try:
        match (await store.latest(RUNNERS_PREFIX + name)).value:
            case {"num": int(num)} if num >= 0:
                return num
            case _:
                return None
    except NotFound:
        return None


def _list_arguments(config: RunnerConfig) -> list[str]:
    return [
        f"--concurrency={max(1, config.concurrency // max(1, config.ray_runners))}",
        f"--processes={config.processes or 0}",
        f"--lease={config.lease_s}",
        *([f"--tracer={config.tracer}"] if config.tracer else []),
    ]
