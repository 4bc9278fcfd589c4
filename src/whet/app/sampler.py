"""What samples for a gateway, and a gateway at work with it. No torch, and no client of servers."""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from whet.app.notify import notified
from whet.app.published import PublishedPolicy, ServedPolicy
from whet.app.working import Gateway
from whet.config import GatewayConfig, RunConfig
from whet.errors import MissingExtra
from whet.gateway.app import build_app
from whet.gateway.render import Renderer
from whet.gateway.service import Log, Service
from whet.gateway.template import ChatTemplate
from whet.protocols import Engine
from whet.runners.given import POLICY
from whet.serving import AppServer
from whet.types import Attempt

if TYPE_CHECKING:
    from whet.app.elsewhere import Elsewhere

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sampler:
    """An engine, and what it is for."""

    engine: Engine
    context_length: int
    renderer: Renderer
    weights: ServedPolicy


def speaker(folder: Path, config: RunConfig) -> Renderer:
    """What renders for the model in a folder."""
    return Renderer(ChatTemplate(folder), keep_thinking=config.gateway.keep_thinking)


@asynccontextmanager
async def serve(
    sampler: Sampler,
    config: RunConfig,
    log: Log,
    secret: bytes,
    *,
    prepare: Callable[[Attempt], Awaitable[None]] | None = None,
    say: Callable[[str], None] = logger.info,
) -> AsyncGenerator[Gateway]:
    """A gateway at work. The sampler's engine is closed when it ends."""
    async with AsyncExitStack() as stack:
        names = (POLICY, *config.gateway.models)
        service = Service(
            engine=sampler.engine,
            log=log,
            renderer=sampler.renderer,
            models=names,
            context_length=sampler.context_length,
            prepare=prepare,
        )
        elsewhere = None
        app: ASGIApp = build_app(service, secret, config.gateway)
        if config.gateway.endpoints:
            app = elsewhere = _elsewhere(app, config.gateway, log, secret, say)
        server = AppServer(
            app,
            host=config.gateway.host,
            port=config.gateway.port,
            name="gateway",
            port_flag="--gateway.port",
        )
        stack.callback(server.close)
        if elsewhere is not None:
            stack.callback(elsewhere.close)
        # Ahead of the server, which waits for its requests: none is left without an answer.
        stack.push_async_callback(sampler.engine.close)
        with notified(server.url):
            yield Gateway(server.url, secret, POLICY)


def _elsewhere(
    app: ASGIApp,
    config: GatewayConfig,
    log: Log,
    secret: bytes,
    say: Callable[[str], None],
) -> "Elsewhere":
    try:
        from whet.app.elsewhere import Elsewhere, relays_of  # noqa: PLC0415 - only if needed
    except ModuleNotFoundError as error:
        raise MissingExtra.of(f"gateway.endpoints ({error})", "eval") from error
    return Elsewhere(app, relays_of(config, log, secret, say))


@asynccontextmanager
async def served_sampler(
    folder: Path,
    published: PublishedPolicy,
    config: RunConfig,
    *,
    place: Path,
    adapter: Path | None = None,
    say: Callable[[str], None],
) -> AsyncGenerator[Sampler]:
    """Servers for a model folder: those of the config, or a `vllm` that is started.

    Its log, and weights in the form that servers load, are kept in `place`. An `adapter` is
    sampled from as it stands.

    Raises:
        ConfigError: there are none, or they cannot be used as they are.
    """
    try:
        from whet.app.server_sampler import open_servers  # noqa: PLC0415 - only if needed
    except ModuleNotFoundError as error:
        raise MissingExtra.of(f"engine.kind {config.engine.kind!r} ({error})", "vllm") from error
    servers = open_servers(folder, published, config, place=place, adapter=adapter, say=say)
    async with servers as sampler:
        yield sampler
