"""Models served without training: `whet.serve`, `whet serve --model`, `whet chat`, and judges."""

import secrets
import tempfile
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from anyio.from_thread import start_blocking_portal
from pydantic import JsonValue

from whet.app.cli.display import open_console
from whet.app.composition.gateway_server import Gateway, check_own_process, serve_gateway
from whet.app.composition.samplers import open_model_samplers
from whet.app.evaluation.model_sources import (
    EndpointModel,
    LocalModel,
    PolicySet,
    find_run_folder,
    read_models,
)
from whet.app.inputs import check_one_policy
from whet.config import GatewayConfig, LocalEngineConfig, RunConfig, resolve
from whet.errors import ConfigError
from whet.gateway.pipeline import Log
from whet.io.threads import unwrap_group
from whet.store.sqlite import SQLiteStore
from whet.types import Endpoint

Progress = Callable[[str], None]

BASE_MODEL = "base"
"""Value of `gateway.judge` for the model of the run before training."""

SECTIONS = ("dir", "engine", "gateway")
"""Keys of the config that serving reads."""


@contextmanager
def serve(
    model: str | Path, *, quiet: bool = False, **settings: JsonValue
) -> Generator[Endpoint, None, None]:
    """Serve a run, an adapter, a checkpoint or any other model as `whet serve --model` does.

    Yields the endpoint that an OpenAI client, or an agent as `llm`, needs; the server runs in a
    thread until the block ends. `settings` are `dir`, and keys of the sections `engine` and
    `gateway`.

    Raises:
        ConfigError: the model or a setting is unknown, or the model cannot be loaded.
    """
    if others := sorted(set(settings) - set(SECTIONS)):
        raise ConfigError(
            f"serving does not read {others[0]!r}: expected keys of {', '.join(SECTIONS)}"
        )
    progress = partial(open_console(quiet=quiet).print, highlight=False)
    serving = serve_alone(str(model), resolve(settings), progress)
    with (
        unwrap_group(),
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serving) as open,
    ):
        yield open.own_endpoint


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
async def serve_judge(config: RunConfig, progress: Progress) -> AsyncGenerator[Endpoint]:
    """Serve the model that `gateway.judge` names, beside the policy."""
    assert config.gateway.judge is not None
    source = config.model if config.gateway.judge == BASE_MODEL else config.gateway.judge
    engine = config.engine if config.engine.kind == "local" else LocalEngineConfig()
    update: dict[str, object] = {"engine": engine, "gateway": GatewayConfig(), "policies": {}}
    async with serve_one(source, config.model_copy(update=update), progress) as gateway:
        yield gateway.own_endpoint.model_copy(update={"model": gateway.model})


def _find_served(
    source: str, directory: Path, progress: Progress
) -> tuple[LocalModel | PolicySet, bytes]:
    """Resolve a model as `whet eval` does, and find the secret of its API keys."""
    [model] = read_models([source], None, progress, directory=directory)
    assert not isinstance(model, EndpointModel)
    run = find_run_folder(Path(model.source).expanduser())
    return model, run.read_secret() if run else secrets.token_bytes(32)


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
        gateway["models"] = (model.name, *config.gateway.models)
    config = config.model_copy(update={"gateway": config.gateway.model_copy(update=gateway)})
    with tempfile.TemporaryDirectory() as folder:
        async with (
            SQLiteStore(Path(folder) / "store.db") as log,
            serve_model(model, config, log, secret, Path(folder)) as served,
        ):
            yield served if served.policies else replace(served, model=model.name)
