"""A gateway that serves a sampler over HTTP, a runner whose agents use it, and their collector."""

import hashlib
import logging
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import anyio
from anyio import create_task_group

from whet.algorithms import explain_unread_reward
from whet.app.composition.samplers import Sampler, TextEngine
from whet.app.composition.weight_sync import PolicyFollower, PublishedPolicy
from whet.config import AlgorithmConfig, GatewayConfig, RunConfig, RunnerConfig
from whet.errors import ConfigError, RequestError
from whet.gateway import auth
from whet.gateway.app import build_app
from whet.gateway.pipeline import CallPipeline, Log
from whet.gateway.upstream import UpstreamProxy, UpstreamRouter, build_upstreams
from whet.io.attempt_url import build_attempt_url
from whet.io.files import atomic_file
from whet.io.server import AppServer
from whet.io.threads import unwrap_group
from whet.protocols import Collector, Resources, Store
from whet.runners.agent import POLICY, Agent
from whet.runners.collector import QueueCollector
from whet.runners.diagnostics import ExplainUnread, read_all
from whet.runners.endpoints import Connection, Endpoints
from whet.runners.hooks import Hooks
from whet.runners.judges.group_ranking import JudgedCollector
from whet.runners.judges.judge import Judge
from whet.runners.runner import Runner, RunnerStore
from whet.types import GATEWAY_PREFIX, JUDGE_MODEL, Attempt, Endpoint, Outcome, Reward

logger = logging.getLogger(__name__)

PORT_FLAG = "--gateway.port"
ADDRESS_FILE = "LLM_SERVER_NOTIFY_FILE"
"""Environment variable that names the file for the gateway's address."""
CORES_EACH = 4
"""Cores of a machine for each gateway process that is started by default."""
MAX_PROCESSES = 2
"""Gateway processes that are started by default: on 16 cores four were no faster."""


@dataclass(frozen=True, slots=True)
class Gateway(Endpoints):
    """Address and credentials of a running gateway, which lives as long as its runner."""

    url: str
    secret: bytes
    model: str
    policies: tuple[str, ...] = ()
    """Names of the policies, if there are several; `model` is the first."""

    def endpoint(self, attempt: Attempt) -> Endpoint:
        """The endpoint of an attempt: its path and its key both name the attempt."""
        base_url = build_attempt_url(self.url, attempt)
        return Endpoint(
            base_url=base_url,
            api_key=auth.mint_key(attempt.id, self.secret),
            model=self.model,
            reward_key=auth.mint_reward_key(attempt.id, self.secret),
            policies=self.policies,
        )

    async def wait_ready(self) -> None:
        pass

    def connect(self, attempt: Attempt) -> Connection:
        return Connection(self.endpoint(attempt))

    @property
    def own_endpoint(self) -> Endpoint:
        """The endpoint for calls outside attempts, where the config allows them."""
        key = auth.mint_key(auth.ANY_ATTEMPT, self.secret)
        return Endpoint(
            base_url=f"{self.url}/v1", api_key=key, model=self.model, policies=self.policies
        )


def count_gateways(config: RunConfig) -> int:
    """Gateway processes of a run; 0 if the gateway is in the process that trains.

    Raises:
        ConfigError: more than the runners of the config can use.
    """
    wanted, most = config.gateway.processes, MAX_PROCESSES
    # A port, or a file with the address, is that of one gateway; runners of a cluster know one.
    if config.gateway.port or os.environ.get(ADDRESS_FILE) or config.runner.ray is not None:
        most = 1
        if wanted is not None and wanted > most:
            raise ConfigError(
                f"gateway.processes is {wanted}, but gateway.port, {ADDRESS_FILE} and runner.ray "
                "are for one gateway: set it to 1 or 0"
            )
    if config.policies:
        most = 0
        if wanted:
            raise ConfigError(
                f"gateway.processes is {wanted}, but the gateway of several policies is in the "
                "process that trains: leave it out"
            )
    if wanted is not None:
        return wanted
    if config.runner.processes == 0 or config.runner.ray is not None:
        return 0
    return min(len(os.sched_getaffinity(0)) // CORES_EACH, most)


@asynccontextmanager
async def serve_gateway(
    samplers: Mapping[str, TextEngine],
    config: RunConfig,
    log: Log,
    secret: bytes,
    *,
    prepare: Callable[[Attempt], Awaitable[None]] | None = None,
    algorithms: Callable[[], Sequence[AlgorithmConfig]] = tuple,
    judge: Endpoint | None = None,
    listener: socket.socket | None = None,
    progress: Callable[[str], None] = logger.info,
) -> AsyncGenerator[Gateway]:
    """Serve the sampler of each policy over HTTP, at a `listener` if there is one.

    Their engines are closed at the end. The only policy has no name. `prepare` is awaited before a
    call of an attempt is sampled. `algorithms` returns the settings that posted rewards are checked
    by, if they are known. Calls of the model `judge` go to that endpoint.
    """
    async with AsyncExitStack() as stack:
        pipelines = build_pipelines(samplers, config, log, prepare)
        is_read = partial(check_reward, algorithms)
        first, *others = pipelines
        app = build_app(first, secret, config.gateway, is_read, others=others)
        router = None
        if config.gateway.endpoints or judge:
            upstreams = await build_upstreams(config.gateway, log, secret, progress)
            if judge is not None:
                upstreams |= build_judge(judge, config, log, secret)
            app = router = UpstreamRouter(app, upstreams, secret, config.gateway)
        server = AppServer(
            app,
            host=config.gateway.host,
            port=config.gateway.port,
            name="gateway",
            port_flag=PORT_FLAG,
            listener=listener,
        )
        stack.callback(server.close)
        if router is not None:
            stack.push_async_callback(router.close)
        # Before the server, which waits for open requests: closing the engine answers them.
        for sampler in samplers.values():
            stack.push_async_callback(sampler.engine.close)
        with write_address_file(server.url):
            yield Gateway(
                server.url, secret, next(iter(samplers)) or POLICY, tuple(filter(None, samplers))
            )


def build_pipelines(
    samplers: Mapping[str, TextEngine],
    config: RunConfig,
    log: Log,
    prepare: Callable[[Attempt], Awaitable[None]] | None = None,
) -> list[CallPipeline]:
    """The pipeline of each policy, by whose model names agents choose it."""
    pipelines: list[CallPipeline] = []
    for name, sampler in samplers.items():
        names = (name, *config.policies[name].models) if name else _name_policy(config.gateway)
        pipelines.append(
            CallPipeline(
                engine=sampler.engine,
                log=log,
                renderer=sampler.renderer,
                models=names,
                context_length=sampler.context_length,
                prepare=prepare,
                policy=name,
                shares_with=pipelines[0] if pipelines else None,
            )
        )
    return pipelines


def _name_policy(config: GatewayConfig) -> tuple[str, ...]:
    """The model names of a single policy; where any client calls, its own names come first."""
    return (*config.models, POLICY) if config.allow_unattributed else (POLICY, *config.models)


def check_own_process(config: RunConfig) -> None:
    """Raise ConfigError if the config asks for gateways in other processes."""
    if config.gateway.processes:
        raise ConfigError(
            "gateway.processes is for training: this command runs the gateway in its own process"
        )


def build_judge(
    judge: Endpoint, config: RunConfig, log: Log, secret: bytes
) -> dict[str, UpstreamProxy]:
    """Build the proxy to the model that `gateway.judge` names, by its name."""
    proxy = UpstreamProxy(
        judge.base_url,
        judge.model,
        judge.api_key,
        log=log,
        secret=secret,
        config=config.gateway,
        forces_sampling=False,
    )
    return {JUDGE_MODEL: proxy}


@asynccontextmanager
async def serve_published(
    sampler: Sampler,
    published: PublishedPolicy,
    config: RunConfig,
    store: Store,
    secret: bytes,
    progress: Callable[[str], None],
) -> AsyncGenerator[Gateway]:
    """Serve a sampler that loads the policy a run publishes as soon as an attempt needs it."""
    follower = PolicyFollower(sampler.weights, published, store)
    await follower.load_newest()
    async with serve_gateway(
        {"": sampler},
        config,
        store,
        secret,
        prepare=follower.prepare,
        algorithms=lambda: list(filter(None, [follower.published.algorithm])),
        progress=progress,
    ) as gateway:
        yield gateway


def read_algorithms(config: RunConfig) -> list[AlgorithmConfig]:
    """The settings of the algorithms of every trained policy."""
    return [config.for_policy(name).algorithm for name in config.trained_policies]


async def explain_unread(algorithms: Sequence[AlgorithmConfig], reward: Reward) -> str:
    """Return why no algorithm of the run reads a reward; empty if one may."""
    return explain_unread_reward(reward, algorithms)


def check_reward(algorithms: Callable[[], Sequence[AlgorithmConfig]], reward: Reward) -> None:
    """Raise RequestError for a reward that no algorithm of the run reads."""
    if reason := explain_unread_reward(reward, algorithms()):
        raise RequestError(f"the reward is refused: {reason}")


@asynccontextmanager
async def run_agents(
    agent: Agent,
    config: RunnerConfig,
    store: RunnerStore,
    endpoints: Endpoints,
    on_outcome: Callable[[Attempt, Outcome], None] = lambda attempt, outcome: None,
    *,
    hooks: Sequence[Hooks] = (),
    explain_unread: ExplainUnread = read_all,
    on_warning: Callable[[str], None] | None = None,
) -> AsyncGenerator[None]:
    """Claim and run rollouts until the block ends; an error of either is raised unwrapped.

    `on_warning` is called with what would make training useless, such as a reward for which
    `explain_unread` returns why the training does not read it.

    Raises:
        ConfigError: the config asks for runners elsewhere.
    """
    if config.ray is not None:
        raise ConfigError("runner.ray is for training: this command runs agents in its own process")
    runner = Runner(
        agent,
        config,
        store=store,
        endpoints=endpoints,
        hooks=hooks,
        on_outcome=on_outcome,
        on_warning=on_warning,
        explain_unread=explain_unread,
    )
    with unwrap_group():
        async with create_task_group() as tasks:
            tasks.start_soon(runner.run)
            yield
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def advertise(resources: Resources, url: str) -> AsyncGenerator[None]:
    """Register the gateway in the store, where runners find it, and remove it at the end."""
    name = GATEWAY_PREFIX + hashlib.blake2b(url.encode(), digest_size=6).hexdigest()
    await resources.publish(name, {"url": url, "model": POLICY})
    try:
        yield
    finally:
        with anyio.move_on_after(5, shield=True):
            await resources.publish(name, None)


def open_collector(
    config: RunConfig,
    store: Store,
    versions: Mapping[str, int | Literal["latest"]],
    judge: Judge | None,
    endpoint: Endpoint | None,
    on_ended: Callable[[int], None] | None,
) -> Collector:
    """The collector of a run; a judge ranks its groups. Raises ConfigError if that has no model."""
    collector = QueueCollector(
        queue=store,
        log=store,
        resources=versions,
        failure_reward=config.failure_reward,
        on_ended=on_ended,
    )
    if judge is None:
        return collector
    if judge.needs_gateway() and endpoint is None:
        raise ConfigError(
            "the judge that ranks groups has no base_url: give it one, or set gateway.judge in "
            "a run of one process"
        )
    return JudgedCollector(collector=collector, judge=judge, spans=store, endpoint=endpoint)


@contextmanager
def write_address_file(url: str) -> Generator[None]:
    """Write the gateway's address to $LLM_SERVER_NOTIFY_FILE, for services that poll it.

    Raises:
        ConfigError: the file cannot be written.
    """
    if not (name := os.environ.get(ADDRESS_FILE)):
        yield
        return
    file, address = Path(name), urlsplit(url).netloc
    try:
        with atomic_file(file) as partial:
            partial.write_text(address)
    except OSError as error:
        raise ConfigError(f"{ADDRESS_FILE}={name!r} cannot be written: {error}") from error
    try:
        yield
    finally:
        with suppress(OSError):
            if file.read_text() == address:  # a later gateway may have written its own
                file.unlink()
