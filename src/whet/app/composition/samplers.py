"""Samplers for a gateway: an engine with its renderer and the weights it samples from.

Torch, the `tinker` client and the HTTP client of servers are imported where they are needed, so
that a gateway of one kind runs without the extras of the others.
"""

import logging
import os
import secrets
import shutil
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import anyio
from anyio import to_thread

from whet.app.composition.weight_sync import EngineWeights, PublishedPolicy, describe_policy
from whet.app.evaluation.model_sources import LocalModel
from whet.config import LocalEngineConfig, RunConfig, VLLMConfig
from whet.errors import ConfigError, EngineError, requires_extra
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.renderer import Renderer
from whet.io.files import make_memory_folder
from whet.io.threads import shorten_thread_turns
from whet.models.catalog import read_model_context
from whet.protocols import Engine

if TYPE_CHECKING:
    from whet.engines.remote.engine import RemoteEngine
    from whet.engines.remote.launch import VLLMProcess
    from whet.models.huggingface import LocalPolicy
    from whet.models.tinker import TinkerPolicy

logger = logging.getLogger(__name__)

SMALL_MODEL = 20_000_000
"""Parameters up to which one thread samples fastest."""

SERVER_LOG = "vllm.log"

ROOM = {"full": 6.0, "lora": 0.5}
"""Memory for weights in transfer, as a multiple of the model's size: a few versions of them."""

NO_ADAPTERS: Mapping[str, Path] = {}

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TextEngine:
    """An engine with its renderer."""

    engine: Engine
    context_length: int
    renderer: Renderer


@dataclass(frozen=True, slots=True)
class Sampler(TextEngine):
    """An engine with its renderer and weights."""

    weights: EngineWeights


@asynccontextmanager
async def open_sampler(
    model: Path,
    published: PublishedPolicy,
    config: RunConfig,
    *,
    folder: Path,
    training_gpus: int | None = None,
    progress: Progress,
) -> AsyncGenerator[Sampler]:
    """Sample from a published policy: by the engine of the config, or the Tinker service that has
    its weights.

    Servers keep their logs in `folder`, and their weights there or in memory. The first
    `training_gpus` of this machine train, if that is known.

    Raises:
        ConfigError: the engine cannot be started or used.
    """
    if published.trainer.kind == "tinker":
        async with _join_tinker(model, published, config) as sampler:
            yield sampler
    elif config.engine.kind == "local":
        async with _load_local(model, published, config) as sampler:
            yield sampler
    else:
        async with open_server_samplers(
            model,
            {"": published},
            config,
            folder=folder,
            training_gpus=training_gpus,
            progress=progress,
        ) as samplers:
            yield samplers[""]


@asynccontextmanager
async def open_model_samplers(
    models: Mapping[str, LocalModel], config: RunConfig, folder: Path
) -> AsyncGenerator[dict[str, Sampler]]:
    """Sample from models, adapters or checkpoints that nothing trains, by the name of the policy.

    `folder` is for servers.

    Raises:
        ConfigError: a server cannot load one of them.
    """
    if config.engine.kind == "local":
        async with AsyncExitStack() as stack:
            opened: dict[int, Sampler] = {}  # by id: one model may serve several names
            bases: dict[Path, LocalPolicy] = {}
            for model in models.values():
                if id(model) not in opened:
                    shared = bases if len(models) > 1 else None
                    policy = await _load_model(model, config, shared)
                    sampler = await stack.enter_async_context(open_local_sampler(policy, config))
                    opened[id(model)] = sampler
            yield {name: opened[id(model)] for name, model in models.items()}
        return
    for model in models.values():
        if model.checkpoint is not None:
            raise ConfigError(
                f"the checkpoint {model.source!r} can only be sampled with engine.kind local: "
                "servers load adapters and model folders"
            )
    first, *others = models.values()
    if any(other.folder.resolve() != first.folder.resolve() for other in others):
        raise ConfigError(
            "the policies have different base models, which one server cannot sample from: set "
            "engine.kind to local"
        )
    published = {name: describe_policy(config, each.folder, 0, "") for name, each in models.items()}
    adapters = {name: model.adapter for name, model in models.items() if model.adapter}
    async with open_server_samplers(
        first.folder, published, config, folder=folder, adapters=adapters, progress=logger.info
    ) as served:
        yield served


def build_renderer(folder: Path, config: RunConfig) -> Renderer:
    """Renderer of the chat template in a model folder."""
    return Renderer(ChatTemplate(folder), keep_thinking=config.gateway.keep_thinking)


# ------------------------------------------------------------------- in this process


@asynccontextmanager
async def open_local_sampler(
    policy: "LocalPolicy", config: RunConfig, renderer: Renderer | None = None
) -> AsyncGenerator[Sampler]:
    """Sample from a policy in this process, which a trainer may share."""
    from whet.engines.local.engine import LocalEngine  # noqa: PLC0415 - imports torch
    from whet.engines.local.forward import check_sampling  # noqa: PLC0415
    from whet.engines.local.grammar import Grammars  # noqa: PLC0415

    assert config.engine.kind == "local"
    await to_thread.run_sync(check_sampling, policy)
    renderer = renderer or build_renderer(policy.folder, config)
    engine = LocalEngine(
        policy,
        config.engine,
        renderer.template.decode,
        grammars=Grammars(policy.folder, renderer.stop_ids),
        threads=choose_sampler_threads(policy),
    )
    try:
        with shorten_thread_turns():
            yield Sampler(engine, engine.context_length, renderer, LocalWeights(policy))
    finally:
        await engine.close()


class LocalWeights(EngineWeights):
    """A policy of this process that loads what a trainer in another process publishes."""

    def __init__(self, policy: "LocalPolicy") -> None:
        self._policy = policy

    @property
    def version(self) -> int:
        return self._policy.version

    async def load(self, published: PublishedPolicy) -> None:
        if not published.weights:
            if self._policy.revision:
                raise EngineError("the run went back to its first weights: restart `whet serve`")
            return
        # Shielded: a thread that changes weights must not outlive the lock.
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(
                self._policy.load_weights, Path(published.weights), published.version
            )


def choose_sampler_threads(policy: "LocalPolicy") -> int:
    """Threads to sample with: a small model gains nothing from more, and agents need the cores."""
    size = sum(parameter.numel() for parameter in policy.model.parameters())
    return 1 if size < SMALL_MODEL else os.cpu_count() or 1


@asynccontextmanager
async def _load_local(
    model: Path, published: PublishedPolicy, config: RunConfig
) -> AsyncGenerator[Sampler]:
    with requires_extra("the local engine", "local"):
        from whet.models.huggingface import LocalPolicy  # noqa: PLC0415 - imports torch
    assert published.trainer.kind == "local"
    # Checkpointing is the trainer's alone: it costs time, and nothing is trained here.
    settings = published.trainer.model_copy(update={"gradient_checkpointing": False})
    policy = LocalPolicy(model, settings, device=config.engine.device, seed=published.seed)
    async with open_local_sampler(policy, config) as sampler:
        yield sampler


async def _load_model(
    model: LocalModel, config: RunConfig, bases: "dict[Path, LocalPolicy] | None" = None
) -> "LocalPolicy":
    """Load a model; with `bases`, adapters share the weights of their base model."""
    with requires_extra("a model of this machine", "local"):
        from whet.models.huggingface import LocalPolicy, load_base  # noqa: PLC0415 - imports torch
        from whet.trainers.local import LocalTrainer  # noqa: PLC0415
    assert config.trainer.kind == "local"
    # A checkpoint has the form its run trained; anything else is sampled as it is.
    settings = model.trainer or config.trainer.model_copy(update={"weights": "full"})
    device, base = config.engine.device, None
    if bases is not None and (model.checkpoint is None or settings.weights == "lora"):
        if model.folder not in bases:
            bases[model.folder] = load_base(model.folder, settings, device=device)
        base = bases[model.folder]
        if not (model.adapter or model.checkpoint):
            return base
    policy = LocalPolicy(
        model.folder, settings, device=device, seed=model.seed, adapter=model.adapter, base=base
    )
    if model.checkpoint is not None:
        await LocalTrainer(policy).restore(model.checkpoint)
    return policy


# ------------------------------------------------------------------- at a Tinker service


@asynccontextmanager
async def open_tinker_sampler(
    policy: "TinkerPolicy", renderer: Renderer
) -> AsyncGenerator[Sampler]:
    """Sample from the weights of a policy at a Tinker service."""
    from whet.engines.tinker import TinkerEngine  # noqa: PLC0415 - the client's import takes long

    engine = TinkerEngine(policy, renderer.template.decode)
    try:
        yield Sampler(engine, engine.context_length, renderer, TinkerWeights(policy))
    finally:
        await engine.close()


class TinkerWeights(EngineWeights):
    """Weights at a Tinker service, by the path that a trainer publishes."""

    def __init__(self, policy: "TinkerPolicy") -> None:
        self._policy = policy

    @property
    def version(self) -> int:
        return self._policy.served

    async def load(self, published: PublishedPolicy) -> None:
        await self._policy.sample_from(published.weights, published.version)


@asynccontextmanager
async def _join_tinker(
    model: Path, published: PublishedPolicy, config: RunConfig
) -> AsyncGenerator[Sampler]:
    if config.engine != LocalEngineConfig():
        raise ConfigError(
            "this run trains with a Tinker service, which also samples: leave out the settings of "
            "the engine"
        )
    with requires_extra("trainer.kind 'tinker'", "tinker"):
        from whet.models.tinker import TinkerPolicy  # noqa: PLC0415 - the client's import takes long
    update = {"model": published.model, "trainer": published.trainer}
    policy = await TinkerPolicy.connect(config.model_copy(update=update))
    try:
        async with open_tinker_sampler(policy, build_renderer(model, config)) as sampler:
            yield sampler
    finally:
        await policy.close()


# ------------------------------------------------------------------- at vLLM or SGLang servers


@asynccontextmanager
async def open_server_samplers(
    model: Path,
    published: Mapping[str, PublishedPolicy],
    config: RunConfig,
    *,
    folder: Path,
    adapters: Mapping[str, Path] = NO_ADAPTERS,
    training_gpus: int | None = None,
    progress: Progress,
) -> AsyncGenerator[dict[str, Sampler]]:
    """Sample from the servers of the config, or from a `vllm` that is started.

    Each of several policies is an adapter at all of them. Logs are kept in `folder`; so are
    converted weights, or in memory for servers that are started. Those of `adapters` are loaded
    unchanged.

    Raises:
        ConfigError: no server answers, or one cannot be used as it is.
    """
    settings = config.engine
    assert settings.kind != "local"
    with requires_extra(f"engine.kind {settings.kind!r}", "gateway"):
        from whet.engines.remote.connect import connect_servers  # noqa: PLC0415 - only if needed
    renderer = build_renderer(model, config)
    async with AsyncExitStack() as stack:
        urls, launched, weights_folder = settings.urls, list["VLLMProcess"](), folder
        if settings.kind == "vllm" and not urls:
            memory = find_memory_folder(folder, model, _choose_transfer(list(published.values())))
            launched = stack.enter_context(
                _start_servers(
                    model, list(published.values()), config, folder, memory, training_gpus, progress
                )
            )
            urls, weights_folder = tuple(server.url for server in launched), memory or folder
        samplers: dict[str, Sampler] = {}
        for name in published:
            engine = await connect_servers(
                settings.kind,
                urls,
                renderer.template.decode,
                context_length=read_model_context(model),
                max_context=settings.max_context,
                startup_error=lambda: next(
                    filter(None, (s.find_startup_error() for s in launched)), None
                ),
                progress=progress,
            )
            stack.push_async_callback(engine.close)
            for server in launched:
                server.mark_ready()
            weights = ServerWeights(
                engine, model, weights_folder / "served", policies=len(published)
            )
            if name in adapters:
                await weights.load_adapter(adapters[name])
            samplers[name] = Sampler(engine, engine.context_length, renderer, weights)
        yield samplers


def _choose_transfer(published: Sequence[PublishedPolicy]) -> Literal["lora", "full"]:
    """Kind of the weights that servers load while they run."""
    trainers = [policy.trainer for policy in published if policy.trainer.kind == "local"]
    return "full" if any(trainer.weights == "full" for trainer in trainers) else "lora"


def _list_server_flags(published: Sequence[PublishedPolicy], settings: VLLMConfig) -> list[str]:
    """Flags of a server that has the adapters of all policies, old versions included."""
    from whet.engines.remote.launch import build_required_flags  # noqa: PLC0415 - only if needed

    trainers = [policy.trainer for policy in published if policy.trainer.kind == "local"]
    widest = max(trainers, key=lambda trainer: trainer.lora_rank)
    versions = sum(policy.staleness + 2 for policy in published)
    return build_required_flags(widest, max_context=settings.max_context, max_versions=versions)


@contextmanager
def _start_servers(
    model: Path,
    published: Sequence[PublishedPolicy],
    config: RunConfig,
    folder: Path,
    memory: Path | None,
    training_gpus: int | None,
    progress: Progress,
) -> Generator[list["VLLMProcess"]]:
    """Start vLLM on the GPUs that do not train; the folder in memory is deleted in the end."""
    from whet.engines.remote.launch import VLLMProcess  # noqa: PLC0415
    from whet.engines.remote.placement import list_visible_gpus, place_servers  # noqa: PLC0415

    settings = config.engine
    assert settings.kind == "vllm"
    flags = _list_server_flags(published, settings)
    placed = place_servers(
        list_visible_gpus(),
        training=training_gpus,
        flags=settings.flags,
        replicas=settings.replicas,
    )
    with ExitStack() as stack:
        if memory is not None:
            stack.callback(shutil.rmtree, memory, ignore_errors=True)
        servers: list[VLLMProcess] = []
        for number, gpus in enumerate(placed):
            log = folder / (f"vllm-{number}.log" if number else SERVER_LOG)
            server = VLLMProcess(model, settings, flags, log=log, gpus=gpus, scratch=memory)
            stack.callback(server.close)
            servers.append(server)
            on = f" on GPU {', '.join(gpus)}" if gpus else ""
            progress(f"vLLM starts at {server.url}{on}; its log is {server.log}")
        yield servers


def find_memory_folder(folder: Path, model: Path, weights: str) -> Path | None:
    """The folder in memory for the weights of servers of this machine, if there is room."""
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return make_memory_folder(folder, needed=round(size * ROOM[weights]) + 2**26)


class ServerWeights(EngineWeights):
    """Weights that servers sample from, each version in a folder while a request may need it."""

    def __init__(
        self, engine: "RemoteEngine", base: Path, folder: Path, *, policies: int = 1
    ) -> None:
        """`policies` is the number of policies that the servers have adapters of."""
        self._engine = engine
        self._policies = policies
        self._base = base.absolute()
        self._folder = folder.absolute()
        self._cwd = Path.cwd()
        """Servers may run in another folder."""
        self._name = secrets.token_hex(4)
        """Distinguishes our adapters from another gateway's at the same servers."""
        self._kept: list[Path] = []

    @property
    def version(self) -> int:
        return self._engine.version

    async def load(self, published: PublishedPolicy) -> None:
        from whet.engines.remote.replicas import WeightsSpec  # noqa: PLC0415 - only if needed

        if not published.weights:
            await self._engine.load(WeightsSpec(published.version))
            return
        # A version may be published twice, by a run that was killed in between.
        name = f"whet-{self._name}-{published.version:06d}-{Path(published.weights).stem[-8:]}"
        target = self._folder / name
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(self._write, published, target)
        assert published.trainer.kind == "local"
        is_lora = published.trainer.weights == "lora"
        await self._engine.load(
            WeightsSpec(
                published.version,
                "lora" if is_lora else "full",
                target,
                name if is_lora else "",
                max_versions=self._policies * (published.staleness + 1),
            )
        )
        self._kept.append(target)
        # A server that restarts reads the newest; a busy one may still read the others.
        for old in self._kept[: -published.staleness - 2]:
            shutil.rmtree(old, ignore_errors=True)
        self._kept = self._kept[-published.staleness - 2 :]

    def _write(self, published: PublishedPolicy, target: Path) -> None:
        from whet.models.export import write_adapter, write_full  # noqa: PLC0415 - safetensors

        weights = Path(published.weights)
        assert published.trainer.kind == "local"
        if published.trainer.weights == "lora":
            write_adapter(weights, target, published.trainer, base=self._base)
        else:
            write_full(weights, target, base=self._base)

    async def load_adapter(self, adapter: Path) -> None:
        """Sample from an adapter folder unchanged."""
        from whet.engines.remote.replicas import WeightsSpec  # noqa: PLC0415 - only if needed

        name = f"whet-{self._name}-{adapter.name}"
        await self._engine.load(WeightsSpec(0, "lora", self._cwd / adapter, name))
