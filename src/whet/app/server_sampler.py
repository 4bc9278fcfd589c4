"""Servers as what samples for a gateway."""

import secrets
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
from anyio import to_thread

from whet.app.published import PublishedPolicy, ServedPolicy
from whet.app.sampler import Sampler, speaker
from whet.config import RunConfig
from whet.engines.joining import join_servers
from whet.engines.launch import LaunchedVLLM, needed_flags
from whet.engines.replicas import ServedWeights
from whet.engines.served import ServedEngine
from whet.policies.catalogue import model_context
from whet.policies.exported import write_adapter, write_full

LOG = "vllm.log"


@asynccontextmanager
async def open_servers(
    folder: Path,
    published: PublishedPolicy,
    config: RunConfig,
    *,
    place: Path,
    adapter: Path | None,
    say: Callable[[str], None],
) -> AsyncGenerator[Sampler]:
    """As `served_sampler` says."""
    kind = config.engine.kind
    assert kind != "local"
    renderer = speaker(folder, config)
    async with AsyncExitStack() as stack:
        urls, launched = config.engine.urls, None
        if not urls:
            flags = needed_flags(
                published.trainer,
                max_context=config.engine.max_context,
                slots=published.staleness + 2,
            )
            launched = LaunchedVLLM(folder, config.engine, flags, log=place / LOG)
            stack.callback(launched.close)
            urls = (launched.url,)
            say(f"vLLM starts at {launched.url}; its log is {launched.log}")
        engine = await join_servers(
            kind,
            urls,
            renderer.template.decode,
            context_length=model_context(folder),
            max_context=config.engine.max_context,
            at_once=config.engine.max_active,
            most_waiting=config.engine.max_waiting,
            alive=launched.why_dead if launched else lambda: None,
            say=say,
        )
        stack.push_async_callback(engine.close)
        if launched:
            launched.was_ready()
        weights = ServerWeights(engine, folder, place / "served")
        if adapter is not None:
            await weights.load_adapter(adapter)
        yield Sampler(engine, engine.context_length, renderer, weights)


class ServerWeights(ServedPolicy):
    """The weights that servers sample from, in folders of their own while anybody needs them."""

    def __init__(self, engine: ServedEngine, base: Path, folder: Path) -> None:
        self._engine = engine
        self._base = base.absolute()
        self._folder = folder.absolute()
        self._cwd = Path.cwd()
        """Servers may run in another folder."""
        self._name = secrets.token_hex(4)
        """Tells our adapters from those of another gateway at the same servers."""
        self._kept: list[Path] = []

    @property
    def version(self) -> int:
        return self._engine.version

    async def load(self, published: PublishedPolicy) -> None:
        if not published.weights:
            await self._engine.load(ServedWeights(published.version))
            return
        # A version may be published twice, by a run that was killed in between.
        name = f"whet-{self._name}-{published.version:06d}-{Path(published.weights).stem[-8:]}"
        target = self._folder / name
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(self._write, published, target)
        lora = published.trainer.weights == "lora"
        await self._engine.load(
            ServedWeights(
                published.version,
                "lora" if lora else "full",
                target,
                name if lora else "",
                slots=published.staleness + 1,
            )
        )
        self._kept.append(target)
        # A server that starts again reads the newest; one that is busy may still read the others.
        for old in self._kept[: -published.staleness - 2]:
            shutil.rmtree(old, ignore_errors=True)
        self._kept = self._kept[-published.staleness - 2 :]

    def _write(self, published: PublishedPolicy, target: Path) -> None:
        weights = Path(published.weights)
        if published.trainer.weights == "lora":
            write_adapter(weights, target, published.trainer, base=self._base)
        else:
            write_full(weights, target, base=self._base)

    async def load_adapter(self, adapter: Path) -> None:
        """Sample from an adapter folder as it stands."""
        name = f"whet-{self._name}-{adapter.name}"
        await self._engine.load(ServedWeights(0, "lora", self._cwd / adapter, name))
