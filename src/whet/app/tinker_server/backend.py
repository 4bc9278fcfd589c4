"""Backend of the Tinker server: training runs and samplers of models in this process.

The base model is in memory once. Every training run has its own LoRA adapters on it, and so has
every engine; an idle engine loads other adapters of the same shape, so a loop that publishes after
each step keeps one engine with its KV cache, buffers and CUDA graphs.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from anyio import CancelScope, to_thread

from whet.app.composition.samplers import build_renderer, choose_sampler_threads
from whet.config import AdamStep, LocalTrainerConfig, RunConfig
from whet.engines.local.engine import LocalEngine
from whet.engines.local.forward import check_sampling
from whet.engines.local.grammar import Grammars
from whet.engines.scorer import LocalScorer, ScoreRequest, TokenScores
from whet.errors import ConfigError, NotFound, RequestError
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.renderer import Renderer
from whet.models.huggingface import LocalPolicy, load_base
from whet.trainers.tinker_datums import Datum, DatumResult, DatumTrainer
from whet.types import Sampling, StopReason, TokenChunk, Value

T = TypeVar("T")

ALPHA = 32
"""LoRA alpha, as at the hosted service: adapters are scaled by `ALPHA / rank`."""
WEIGHTS = "weights.safetensors"


class Lora(Value):
    """Shape of a run's LoRA adapters."""

    rank: int
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Weights(NamedTuple):
    """Adapters in a folder, as saved at a time: a name may be saved again with other weights."""

    folder: Path
    lora: Lora
    created: float


class Sampled(NamedTuple):
    """One sampled sequence."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    top: Sequence[Sequence[tuple[int, float]]]
    """Most likely tokens at each position, if requested."""
    stop: StopReason


class BaseModelInfo(NamedTuple):
    """The base model."""

    name: str
    """Folder or Hugging Face Hub name from which clients load the tokenizer."""
    extra_names: tuple[str, ...]
    """Further names that clients may use."""
    aliases: tuple[str, ...]
    """Those of them that are listed."""
    context_length: int
    vocabulary: int
    eos_ids: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names that clients may use."""
        return (self.name, *self.extra_names)

    @property
    def listed(self) -> tuple[str, ...]:
        """Names that clients find."""
        return (self.name, *self.aliases)


class ModelNames(NamedTuple):
    """A model on this machine, as the user named it."""

    folder: Path
    sources: tuple[str, ...]
    """What it was found by, such as `tiny`."""
    names: tuple[str, ...]
    """Names for clients; that of the folder if there are none."""


class ServedModel(NamedTuple):
    """A base model with what is trained on it and sampled from it."""

    runs: "TrainingRuns"
    samplers: "Samplers"


@asynccontextmanager
async def open_models(
    named: Sequence[ModelNames], config: RunConfig, *, engines: int
) -> AsyncGenerator[list[ServedModel]]:
    """Load models.

    Raises:
        ConfigError: one cannot be loaded or found by its name, or two have the same.
    """
    busy, taken = asyncio.Lock(), set[str]()
    models: list[ServedModel] = []
    for folder, sources, names in named:
        path = str(folder.absolute())
        name, *aliases = names or [name_folder(path)]
        extra_names = (*sources, path, f"{path}/")
        if shared := taken & {name, *aliases, *extra_names}:
            raise ConfigError(
                f"two models have the name {min(shared)!r}: give each its own, --model NAME=MODEL"
            )
        taken |= {name, *aliases, *extra_names}
        base = BaseModel(folder, config)
        samplers = Samplers(base, name, extra_names, engines=engines, aliases=tuple(aliases))
        models.append(ServedModel(TrainingRuns(base, busy), samplers))
    try:
        yield models
    finally:
        with CancelScope(shield=True):
            for model in models:
                await model.samplers.close()


def name_folder(folder: str) -> str:
    """The name by which clients load the tokenizer of a folder.

    They read a name with two slashes as that of a variant, `org/model/variant`, and what follows
    a colon as another.
    """
    if ":" in folder:
        raise ConfigError(
            f"clients split the model folder {folder!r} at its colon: rename it, or name the "
            "model, --model NAME=FOLDER"
        )
    return f"{folder}/" if folder.count("/") == 2 else folder


class BaseModel:
    """The base model, on which adapters are built."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.folder = folder
        self.config = config
        assert config.trainer.kind == "local"
        assert config.engine.kind == "local"
        if config.trainer.gpus > 1:
            raise ConfigError("the Tinker server trains on one GPU: leave out trainer.gpus")
        self._trainer, self.engine = config.trainer, config.engine
        self.policy = load_base(folder, self._trainer, device=self.engine.device)
        check_sampling(self.policy)

    def build_adapters(self, lora: Lora, *, seed: int = 0, trained: bool = False) -> LocalPolicy:
        """Build adapters that are the identity until they are trained or loaded."""
        layers = {"head": lora.train_unembed, "mlp": lora.train_mlp, "attention": lora.train_attn}
        config = LocalTrainerConfig.model_validate(
            {
                **self._trainer.model_dump(),
                "weights": "lora",
                "lora_rank": lora.rank,
                "lora_alpha": ALPHA,
                "lora_layers": [layer for layer, requested in layers.items() if requested],
                **({} if trained else {"gradient_checkpointing": False, "compile": False}),
            }
        )
        return LocalPolicy(
            self.folder, config, device=self.engine.device, seed=seed, base=self.policy
        )


class TrainingRuns:
    """Training runs of a model, by id. One pass runs at a time, also of other models."""

    def __init__(self, base: BaseModel, busy: asyncio.Lock | None = None) -> None:
        self._base = base
        self._runs: dict[str, tuple[LocalPolicy, DatumTrainer]] = {}
        self._busy = busy or asyncio.Lock()

    async def create(self, run: str, lora: Lora, seed: int | None) -> None:
        """Create adapters."""
        seed = secrets.randbits(31) if seed is None else seed % 2**63
        policy = await to_thread.run_sync(
            lambda: self._base.build_adapters(lora, seed=seed, trained=True)
        )
        self._runs[run] = policy, DatumTrainer(policy, threads=choose_sampler_threads(policy))

    def drop(self, run: str) -> None:
        """Release a run, if it is in memory."""
        self._runs.pop(run, None)

    async def forward_backward(
        self,
        run: str,
        data: Sequence[Datum],
        loss: str,
        settings: Mapping[str, float],
        *,
        forward_only: bool,
    ) -> DatumResult:
        """Accumulate the gradient of a loss, unless `forward_only`. Raises RequestError."""
        async with self._busy:
            trainer = self._get(run)[1]
            return await trainer.forward_backward(data, loss, settings, forward_only=forward_only)

    async def optim_step(self, run: str, adam: AdamStep) -> dict[str, float]:
        """Apply the gradient and clear it."""
        async with self._busy:
            return {"grad_norm:mean": await self._get(run)[1].optim_step(adam)}

    async def save(self, run: str, folder: Path, kind: str) -> None:
        """Write `weights`, with the optimizer, `sampler_weights` or `external_weights`."""
        policy, trainer = self._get(run)
        async with self._busy:
            match kind:
                case "weights":
                    await trainer.save(folder)
                case "sampler_weights":
                    await to_thread.run_sync(policy.write_weights, folder / WEIGHTS)
                case _:
                    await to_thread.run_sync(policy.write_model, folder)

    async def load(self, run: str, folder: Path, *, optimizer: bool) -> None:
        """Load a checkpoint of kind `weights`."""
        async with self._busy:
            await self._get(run)[1].restore(folder, optimizer=optimizer)

    def _get(self, run: str) -> tuple[LocalPolicy, DatumTrainer]:
        if run not in self._runs:
            raise NotFound(f"the training run {run!r} has ended")
        return self._runs[run]


@dataclass(eq=False)
class _EngineSlot:
    """An engine with the adapters it has loaded."""

    policy: LocalPolicy
    engine: LocalEngine
    scorer: LocalScorer
    lora: Lora | None
    weights: Weights | None
    busy: int = 0
    used: int = 0
    loaded: int = 0
    """When it loaded its weights, as `used` counts."""
    reserved: tuple[Weights | None] | None = None
    """Weights that a request waits for: until they are loaded, no other request is admitted."""

    def admits(self, weights: Weights | None) -> bool:
        return self.reserved is None or self.reserved[0] == weights


async def _run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run work to its end, also if the task is canceled meanwhile; then the cancellation is raised.

    A thread goes on when the task that awaits it is canceled.
    """
    task = asyncio.create_task(work)
    canceled: asyncio.CancelledError | None = None
    with CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                canceled = error
    if canceled is not None:
        raise canceled
    return task.result()


class Samplers:
    """Samples from the base model, or from saved adapters, by engines that share the base."""

    def __init__(
        self,
        base: BaseModel,
        name: str,
        extra_names: tuple[str, ...],
        *,
        engines: int,
        aliases: tuple[str, ...] = (),
    ) -> None:
        self._base = base
        template = ChatTemplate(base.folder)
        self._decode: Callable[[Sequence[int]], str] = template.decode_all
        self._grammars = Grammars(base.folder, sorted(template.eos_ids))
        self._most = engines
        self._slots: list[_EngineSlot] = []
        self._loading = asyncio.Lock()
        """Held while a request is given an engine, which may have to load its weights first."""
        self._slot_free = asyncio.Event()
        """Set, and replaced by a new one, when a request that waits may find an engine."""
        self._uses = 0
        self._waiting = Counter[Weights | None]()
        """Requests that wait for an engine, by the weights they need."""
        self.served = BaseModelInfo(
            name=name,
            extra_names=(*extra_names, *aliases),
            aliases=aliases,
            context_length=base.policy.context_length,
            vocabulary=base.policy.vocabulary,
            eos_ids=tuple(sorted(template.eos_ids)),
        )

    @cached_property
    def renderer(self) -> Renderer:
        """Renderer of the model's chat template. Raises ConfigError if it has none."""
        return build_renderer(self._base.folder, self._base.config)

    async def sample(
        self, weights: Weights | None, prompt: Sequence[int], sampling: Sampling
    ) -> Sampled:
        """Sample one sequence; concurrent requests are batched."""
        async with aclosing(self.generate(weights, prompt, sampling, stream=False)) as chunks:
            chunk = await anext(chunks)
        assert chunk.stop is not None  # without streaming there is one chunk
        return Sampled(chunk.tokens, chunk.logprobs, chunk.top, chunk.stop)

    async def generate(
        self,
        weights: Weights | None,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        stream: bool,
    ) -> AsyncGenerator[TokenChunk]:
        """Sample one sequence in chunks, as an engine does."""
        async with (
            self._acquire_slot(weights) as slot,
            aclosing(slot.engine.generate(prompt, sampling, stream=stream)) as chunks,
        ):
            async for chunk in chunks:
                yield chunk

    async def score(
        self, weights: Weights | None, prompt: Sequence[int], request: ScoreRequest
    ) -> TokenScores:
        """Score the tokens of a prompt. Raises RequestError if it does not fit the model."""
        most = self.served.context_length
        if not 1 <= len(prompt) <= most:
            raise RequestError(f"the prompt has {len(prompt)} tokens; this model takes 1 to {most}")
        if min(prompt) < 0 or max(prompt) >= self.served.vocabulary:
            raise RequestError(f"the prompt has ids outside 0 to {self.served.vocabulary - 1}")
        async with self._acquire_slot(weights) as slot:
            return await slot.scorer.score(prompt, request)

    async def close(self) -> None:
        """Close all engines."""
        for slot in self._slots:
            await slot.engine.close()

    @asynccontextmanager
    async def _acquire_slot(self, weights: Weights | None) -> AsyncGenerator[_EngineSlot]:
        slot = await self._claim_slot(weights)
        try:
            yield slot
        finally:  # without an await, which a cancellation could interrupt
            slot.busy -= 1
            self._notify()

    async def _claim_slot(self, weights: Weights | None) -> _EngineSlot:
        """Return an engine with these weights: one that has them, else an idle or a new one.

        If all are busy with others, one of them is reserved: it takes no more work until it has
        loaded these weights, so that no set of weights is starved by the load on others.
        """
        self._waiting[weights] += 1
        try:
            while True:
                slot_free = self._slot_free
                async with self._loading:
                    slot = await _run_to_end(self._get(weights))
                    if slot is not None:
                        self._uses += 1
                        slot.busy, slot.used = slot.busy + 1, self._uses
                        return slot
                await slot_free.wait()
        finally:
            self._waiting[weights] -= 1
            if not self._waiting[weights]:
                del self._waiting[weights]
                self._release(weights)

    def _notify(self) -> None:
        self._slot_free.set()
        self._slot_free = asyncio.Event()

    def _reserve(self, weights: Weights | None) -> None:
        if not any(slot.reserved == (weights,) for slot in self._slots):
            free = [slot for slot in self._slots if slot.reserved is None]
            if free:
                min(free, key=lambda slot: slot.loaded).reserved = (weights,)

    def _release(self, weights: Weights | None) -> None:
        """Remove a reservation that was met, or that no request waits for any more."""
        for slot in self._slots:
            if slot.reserved == (weights,):
                slot.reserved = None
                self._notify()

    async def _get(self, weights: Weights | None) -> _EngineSlot | None:
        lora = weights.lora if weights else None
        for slot in self._slots:
            if (slot.weights, slot.lora) == (weights, lora) and slot.admits(weights):
                return slot
        idle = [slot for slot in self._slots if not slot.busy and slot.admits(weights)]
        idle.sort(key=lambda slot: slot.used)
        alike = [slot for slot in idle if slot.lora == lora]
        # The most recently used, so that the other engines keep their KV caches.
        if weights is not None and alike:
            await self._load(alike[-1], weights)
            alike[-1].loaded = self._uses
            return alike[-1]
        if len(self._slots) >= self._most:
            if not idle:
                self._reserve(weights)
                return None
            self._slots.remove(idle[0])
            await idle[0].engine.close()
        slot = await to_thread.run_sync(self._open_slot, lora)
        self._slots.append(slot)  # also if the weights cannot be loaded: it is closed with the rest
        if weights is not None:
            await self._load(slot, weights)
        slot.loaded = self._uses
        return slot

    async def _load(self, slot: _EngineSlot, weights: Weights) -> None:
        file, version = weights.folder / WEIGHTS, slot.policy.version + 1
        slot.weights = None
        await to_thread.run_sync(slot.policy.load_weights, file, version)
        slot.weights = weights

    def _open_slot(self, lora: Lora | None) -> _EngineSlot:
        policy = self._base.build_adapters(lora) if lora else self._base.policy
        engine = LocalEngine(
            policy,
            self._base.engine,
            self._decode,
            grammars=self._grammars,
            threads=choose_sampler_threads(policy),
        )
        return _EngineSlot(policy, engine, LocalScorer(policy), lora, None)
