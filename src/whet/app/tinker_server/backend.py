"""Protocols of the server's backend: training runs and samplers of each model."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from whet.config import AdamStep
from whet.gateway.templates.renderer import Renderer
from whet.types import Sampling, StopReason, TokenChunk, Value

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class Lora(Value):
    """Shape of a run's LoRA adapters."""

    rank: int
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Example(NamedTuple):
    """A training datum: tokens and named arrays of one shape."""

    tokens: tuple[int, ...]
    targets: Ids
    inputs: Mapping[str, Floats]


class PassResult(NamedTuple):
    """Result of a forward or forward-backward pass."""

    logprobs: Sequence[Floats]
    loss: float


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


class PromptScoreRequest(NamedTuple):
    """Scores requested for the tokens of a prompt."""

    top: int = 0
    targets: Ids | None = None
    """(T - 1, K)."""
    draws: int = 0
    temperature: float = 1.0


class PromptScores(NamedTuple):
    """Scores of every prompt token but the first."""

    chosen: Floats
    top: tuple[Ids, Floats]
    targets: Floats
    drawn: tuple[Ids, Floats]


class BaseModelInfo(NamedTuple):
    """The base model."""

    name: str
    """Folder or Hugging Face Hub name from which clients load the tokenizer."""
    also: tuple[str, ...]
    """Further names that clients may use."""
    aliases: tuple[str, ...]
    """Those of them that are listed."""
    context_length: int
    vocabulary: int
    eos_ids: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names that clients may use."""
        return (self.name, *self.also)

    @property
    def listed(self) -> tuple[str, ...]:
        """Names that clients find."""
        return (self.name, *self.aliases)


class TrainingRuns(Protocol):
    """Training runs in memory, by id."""

    async def create(self, run: str, lora: Lora, seed: int | None) -> None:
        """Create adapters. Raises RequestError if they are not supported."""
        ...

    def drop(self, run: str) -> None:
        """Release a run, if it is in memory."""
        ...

    async def forward_backward(
        self,
        run: str,
        data: Sequence[Example],
        loss: str,
        settings: Mapping[str, float],
        *,
        forward_only: bool,
    ) -> PassResult:
        """Accumulate the gradient of a loss, unless `forward_only`. Raises RequestError."""
        ...

    async def optim_step(self, run: str, adam: AdamStep) -> dict[str, float]:
        """Apply the gradient and clear it."""
        ...

    async def save(self, run: str, folder: Path, kind: str) -> None:
        """Write `weights`, with the optimizer, `sampler_weights` or `external_weights`."""
        ...

    async def load(self, run: str, folder: Path, *, optimizer: bool) -> None:
        """Load a checkpoint of kind `weights`."""
        ...


class Samplers(Protocol):
    """Samples from the base model, or from saved adapters."""

    served: BaseModelInfo

    @property
    def renderer(self) -> Renderer:
        """Renderer of the model's chat template. Raises ConfigError if it has none."""
        ...

    async def sample(
        self, weights: Weights | None, prompt: Sequence[int], sampling: Sampling
    ) -> Sampled:
        """Sample one sequence; concurrent requests are batched."""
        ...

    def generate(
        self,
        weights: Weights | None,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        stream: bool,
    ) -> AsyncGenerator[TokenChunk]:
        """Sample one sequence in chunks, as an engine does."""
        ...

    async def score(
        self, weights: Weights | None, prompt: Sequence[int], request: PromptScoreRequest
    ) -> PromptScores:
        """Score the tokens of a prompt."""
        ...


class ServedModel(NamedTuple):
    """A base model with what is trained on it and sampled from it."""

    runs: TrainingRuns
    samplers: Samplers
