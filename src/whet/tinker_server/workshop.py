"""What the server asks of whoever has the model: training runs, and samplers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from whet.config import AdamConfig
from whet.types import Sampling, StopReason, Value

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class Lora(Value):
    """The shape of a run's adapters."""

    rank: int
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Example(NamedTuple):
    """A datum of the wire: tokens, and named arrays of one shape."""

    tokens: tuple[int, ...]
    targets: Ids
    inputs: Mapping[str, Floats]


class Passed(NamedTuple):
    """What a pass over examples came to."""

    logprobs: Sequence[Floats]
    loss: float


class Weights(NamedTuple):
    """What a sampler samples from: adapters in a folder."""

    folder: Path
    lora: Lora


class Sampled(NamedTuple):
    """One sequence."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    top: Sequence[Sequence[tuple[int, float]]]
    """The likeliest tokens at each place, if asked for."""
    stop: StopReason


class PromptAsked(NamedTuple):
    """What is wanted of the prompt's tokens."""

    top: int = 0
    targets: Ids | None = None
    """(T - 1, K)."""
    draws: int = 0
    temperature: float = 1.0


class PromptScores(NamedTuple):
    """Of every token of a prompt but the first."""

    chosen: Floats
    top: tuple[Ids, Floats]
    targets: Floats
    drawn: tuple[Ids, Floats]


class Served(NamedTuple):
    """The base model."""

    name: str
    """Where clients load the tokenizer from: a folder, or a name on the Hugging Face Hub."""
    also: tuple[str, ...]
    """What else they may call it."""
    context_length: int
    vocabulary: int
    eos_ids: tuple[int, ...]


class TrainingRuns(Protocol):
    """Adapters that are being trained, by the id of their run."""

    async def create(self, run: str, lora: Lora, seed: int | None) -> None:
        """Make new adapters. Raises RequestError if they cannot be had."""
        ...

    def forget(self, run: str) -> None:
        """Let go of a run, if it is there."""
        ...

    async def forward_backward(
        self,
        run: str,
        data: Sequence[Example],
        loss: str,
        settings: Mapping[str, float],
        *,
        forward_only: bool,
    ) -> Passed:
        """Add the gradient of a loss, unless `forward_only`. Raises RequestError for bad data."""
        ...

    async def optim_step(self, run: str, adam: AdamConfig) -> dict[str, float]:
        """Apply the gradient and clear it."""
        ...

    async def save(self, run: str, folder: Path, kind: str) -> None:
        """Write `weights`, with the optimizer, `sampler_weights` or `external_weights`."""
        ...

    async def load(self, run: str, folder: Path, *, optimizer: bool) -> None:
        """Take what was saved as `weights`."""
        ...


class Samplers(Protocol):
    """Samples from the base model, or from saved adapters."""

    served: Served

    async def sample(
        self, weights: Weights | None, prompt: Sequence[int], sampling: Sampling
    ) -> Sampled:
        """One sequence; many at once are sampled together."""
        ...

    async def score(
        self, weights: Weights | None, prompt: Sequence[int], asked: PromptAsked
    ) -> PromptScores:
        """The prompt itself."""
        ...
