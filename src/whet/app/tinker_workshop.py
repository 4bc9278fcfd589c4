"""Training runs and samplers on one model of this machine, for the server of the `tinker` wire.

The base model is in memory once. Every run has adapters of its own on it, and so has every engine;
an engine that is idle takes other adapters of the same shape, so a loop that publishes after each
step keeps one engine, with its keys and values, its buffers and its CUDA graphs.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from anyio import to_thread

from whet.app.local_sampler import sampler_threads
from whet.config import AdamConfig, EngineConfig, RunConfig, TrainerConfig
from whet.engines.local import LocalEngine
from whet.engines.scorer import Asked, LocalScorer
from whet.errors import NotFound, RequestError
from whet.gateway.template import ChatTemplate
from whet.policies.local import LocalPolicy
from whet.tinker_server.workshop import (
    Example,
    Lora,
    Passed,
    PromptAsked,
    PromptScores,
    Sampled,
    Samplers,
    Served,
    TrainingRuns,
    Weights,
)
from whet.trainers.datums import Datum, DatumTrainer
from whet.types import Sampling

ALPHA = 32
"""Adapters count this over their rank, as the hosted service has it."""
WEIGHTS = "weights.safetensors"


class Base:
    """The base model and how adapters are put on it."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.folder = folder
        self._config = config
        plain = {"weights": "full", "gradient_checkpointing": False, "compile": False}
        self.policy = LocalPolicy(
            folder,
            config.trainer.model_copy(update=plain),
            device=config.engine.device,
            seed=0,
        )
        for parameter in self.policy.model.parameters():
            parameter.requires_grad_(False)

    @property
    def engine(self) -> EngineConfig:
        return self._config.engine

    def adapted(self, lora: Lora, *, seed: int = 0, trained: bool = False) -> LocalPolicy:
        """New adapters, which change nothing until they are trained or loaded."""
        layers = {"head": lora.train_unembed, "mlp": lora.train_mlp, "attention": lora.train_attn}
        config = TrainerConfig.model_validate(
            {
                **self._config.trainer.model_dump(),
                "weights": "lora",
                "lora_rank": lora.rank,
                "lora_alpha": ALPHA,
                "lora_layers": [layer for layer, wanted in layers.items() if wanted],
                **({} if trained else {"gradient_checkpointing": False, "compile": False}),
            }
        )
        return LocalPolicy(
            self.folder, config, device=self.engine.device, seed=seed, base=self.policy
        )


class LocalRuns(TrainingRuns):
    """Adapters in this process. One pass is computed at a time."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self._runs: dict[str, tuple[LocalPolicy, DatumTrainer]] = {}
        self._busy = asyncio.Lock()

    async def create(self, run: str, lora: Lora, seed: int | None) -> None:
        seed = secrets.randbits(31) if seed is None else seed % 2**63
        policy = await to_thread.run_sync(lambda: self._base.adapted(lora, seed=seed, trained=True))
        self._runs[run] = policy, DatumTrainer(policy, threads=sampler_threads(policy))

    def forget(self, run: str) -> None:
        self._runs.pop(run, None)

    async def forward_backward(
        self,
        run: str,
        data: Sequence[Example],
        loss: str,
        settings: Mapping[str, float],
        *,
        forward_only: bool,
    ) -> Passed:
        datums = [Datum(*example) for example in data]
        async with self._busy:
            trainer = self._found(run)[1]
            found = await trainer.forward_backward(
                datums, loss, settings, forward_only=forward_only
            )
        return Passed(*found)

    async def optim_step(self, run: str, adam: AdamConfig) -> dict[str, float]:
        async with self._busy:
            return {"grad_norm:mean": await self._found(run)[1].optim_step(adam)}

    async def save(self, run: str, folder: Path, kind: str) -> None:
        policy, trainer = self._found(run)
        async with self._busy:
            match kind:
                case "weights":
                    await trainer.save(folder)
                case "sampler_weights":
                    await to_thread.run_sync(policy.write_weights, folder / WEIGHTS)
                case _:
                    await to_thread.run_sync(policy.write_model, folder)

    async def load(self, run: str, folder: Path, *, optimizer: bool) -> None:
        async with self._busy:
            await self._found(run)[1].restore(folder, optimizer=optimizer)

    def _found(self, run: str) -> tuple[LocalPolicy, DatumTrainer]:
        if run not in self._runs:
            raise NotFound(f"the training run {run!r} has ended")
        return self._runs[run]


@dataclass(eq=False)
class _Desk:
    """An engine, and whose weights it has."""

    policy: LocalPolicy
    engine: LocalEngine
    scorer: LocalScorer
    lora: Lora | None
    weights: Weights | None
    busy: int = 0
    used: int = 0


class LocalSamplers(Samplers):
    """A few engines that share the base model."""

    def __init__(self, base: Base, name: str, also: tuple[str, ...], *, engines: int) -> None:
        self._base = base
        template = ChatTemplate(base.folder)
        self._decode: Callable[[Sequence[int]], str] = template.decode_all
        self._most = engines
        self._desks: list[_Desk] = []
        self._turn = asyncio.Condition()
        self._uses = 0
        self.served = Served(
            name=name,
            also=also,
            context_length=base.policy.context_length,
            vocabulary=base.policy.vocabulary,
            eos_ids=tuple(sorted(template.eos_ids)),
        )

    async def sample(
        self, weights: Weights | None, prompt: Sequence[int], sampling: Sampling
    ) -> Sampled:
        async with (
            self._desk(weights) as desk,
            aclosing(desk.engine.generate(prompt, sampling)) as pieces,
        ):
            piece = await anext(pieces)
        assert piece.stop is not None  # it comes in one piece
        return Sampled(piece.tokens, piece.logprobs, piece.top, piece.stop)

    async def score(
        self, weights: Weights | None, prompt: Sequence[int], asked: PromptAsked
    ) -> PromptScores:
        most = self.served.context_length
        if not 1 <= len(prompt) <= most:
            raise RequestError(f"the prompt has {len(prompt)} tokens; this model takes 1 to {most}")
        if min(prompt) < 0 or max(prompt) >= self.served.vocabulary:
            raise RequestError(f"the prompt has ids outside 0 to {self.served.vocabulary - 1}")
        async with self._desk(weights) as desk:
            return PromptScores(*await desk.scorer.tell(prompt, Asked(*asked)))

    async def close(self) -> None:
        """Stop all engines."""
        for desk in self._desks:
            await desk.engine.close()

    @asynccontextmanager
    async def _desk(self, weights: Weights | None) -> AsyncGenerator[_Desk]:
        desk = await self._take(weights)
        try:
            yield desk
        finally:
            async with self._turn:
                desk.busy -= 1
                self._turn.notify_all()

    async def _take(self, weights: Weights | None) -> _Desk:
        """An engine with these weights: the one that has them, an idle one, or a new one."""
        async with self._turn:
            while (desk := await self._found(weights)) is None:
                await self._turn.wait()
            self._uses += 1
            desk.busy, desk.used = desk.busy + 1, self._uses
            return desk

    async def _found(self, weights: Weights | None) -> _Desk | None:
        for desk in self._desks:
            if desk.weights == weights:
                return desk
        lora = weights.lora if weights else None
        idle = sorted((d for d in self._desks if not d.busy), key=lambda desk: desk.used)
        alike = [desk for desk in idle if desk.lora == lora]
        # The newest of its kind, so that what else there is keeps its keys and values.
        if weights is not None and alike:
            await self._load(alike[-1], weights)
            return alike[-1]
        if len(self._desks) >= self._most:
            if not idle:
                return None
            self._desks.remove(idle[0])
            await idle[0].engine.close()
        desk = await to_thread.run_sync(self._opened, lora)
        if weights is not None:
            await self._load(desk, weights)
        self._desks.append(desk)
        return desk

    async def _load(self, desk: _Desk, weights: Weights) -> None:
        file, version = weights.folder / WEIGHTS, desk.policy.version + 1
        desk.weights = None
        await to_thread.run_sync(desk.policy.load_weights, file, version)
        desk.weights = weights

    def _opened(self, lora: Lora | None) -> _Desk:
        policy = self._base.adapted(lora) if lora else self._base.policy
        engine = LocalEngine(
            policy, self._base.engine, self._decode, threads=sampler_threads(policy)
        )
        return _Desk(policy, engine, LocalScorer(policy), lora, None)
