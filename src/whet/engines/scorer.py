"""Scores tokens with a Hugging Face model in this process: a teacher that is never trained."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from anyio import to_thread
from numpy.typing import NDArray
from torch import Tensor

from whet.errors import EngineError, boundary
from whet.policies.local import LocalPolicy
from whet.protocols import Scorer

SCORED_TOKENS = 4096
"""Most padded tokens in one forward pass; bounds its memory."""


class Asked(NamedTuple):
    """What is wanted of a sequence, besides the log-probabilities of its tokens."""

    top: int = 0
    """How many of the likeliest tokens at each place."""
    targets: NDArray[np.int64] | None = None
    """Other tokens to score, (T - 1, K)."""
    draws: int = 0
    """How many tokens to draw at each place, at `temperature`."""
    temperature: float = 1.0


class Told(NamedTuple):
    """Log-probabilities of what may follow each token of a sequence but the last."""

    chosen: NDArray[np.float32]
    """Of the token that does, (T - 1,)."""
    top: tuple[NDArray[np.int64], NDArray[np.float32]]
    """The likeliest, (T - 1, top)."""
    targets: NDArray[np.float32]
    drawn: tuple[NDArray[np.int64], NDArray[np.float32]]


class LocalScorer(Scorer):
    """Plain forward passes over padded sequences of like lengths."""

    def __init__(self, policy: LocalPolicy) -> None:
        self._policy = policy

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        longest = max(map(len, sequences), default=0)
        if longest > self._policy.context_length:
            raise EngineError(
                f"a sequence has {longest} tokens; the scoring model's context holds "
                f"{self._policy.context_length}"
            )
        return await to_thread.run_sync(self._score, sequences)

    async def tell(self, tokens: Sequence[int], asked: Asked) -> Told:
        """More of one sequence, whose ids the model knows. Raises EngineError."""
        return await to_thread.run_sync(self._tell, tokens, asked)

    # ----------------------------------------------------------------- in a worker thread

    def _score(self, sequences: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        scored: dict[int, tuple[float, ...]] = {}
        with boundary(EngineError, "scoring failed"):
            for places in _batches(sequences):
                batch = self._forward([sequences[place] for place in places])
                scored |= zip(places, batch, strict=True)
        return [scored[place] for place in range(len(sequences))]

    @torch.inference_mode()
    def _forward(self, batch: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        width = max(map(len, batch))
        padded = [[*tokens, *[0] * (width - len(tokens))] for tokens in batch]
        ids_BT = torch.tensor(padded, device=self._policy.device)
        with self._policy.lock:
            # Padding stands on the right, where nothing before it looks.
            logits_BTV = self._policy.model(input_ids=ids_BT, use_cache=False).logits
        chosen_BT = logits_BTV[:, :-1].float().log_softmax(-1).gather(2, ids_BT[:, 1:, None])
        rows = zip(chosen_BT[:, :, 0].tolist(), batch, strict=True)
        return [tuple(row[: len(tokens) - 1]) for row, tokens in rows]

    @torch.inference_mode()
    def _tell(self, tokens: Sequence[int], asked: Asked) -> Told:
        with boundary(EngineError, "scoring failed"):
            ids_1T = torch.tensor([list(tokens)], device=self._policy.device)
            with self._policy.lock:
                logits_TV = self._policy.model(input_ids=ids_1T, use_cache=False).logits[0, :-1]
            logp_TV = cast(Tensor, logits_TV.float().log_softmax(-1))
            targets = np.zeros((len(logp_TV), 0), np.int64)
            if asked.targets is not None:
                targets = asked.targets
            target_TK = torch.from_numpy(targets).to(ids_1T.device)
            top = logp_TV.topk(asked.top, dim=-1)
            drawn_TK = _drawn(logp_TV, asked)
            return Told(
                chosen=_floats(logp_TV.gather(1, ids_1T[0, 1:, None])[:, 0]),
                top=(_ids(top.indices), _floats(top.values)),
                targets=_floats(logp_TV.gather(1, target_TK)),
                drawn=(_ids(drawn_TK), _floats(logp_TV.gather(1, drawn_TK))),
            )


def _drawn(logp_TV: Tensor, asked: Asked) -> Tensor:
    if not asked.draws or not len(logp_TV):
        return torch.zeros(len(logp_TV), 0, dtype=torch.int64, device=logp_TV.device)
    if asked.temperature == 0:
        return logp_TV.argmax(-1, keepdim=True).expand(-1, asked.draws)
    shares_TV = (logp_TV / asked.temperature).softmax(-1)
    # Torch's own generator of a GPU draws nothing while another engine records a graph.
    generator = torch.Generator(shares_TV.device)
    generator.seed()
    return torch.multinomial(shares_TV, asked.draws, replacement=True, generator=generator)


def _floats(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.float().cpu().numpy()


def _ids(tensor: Tensor) -> NDArray[np.int64]:
    return tensor.cpu().numpy()


def _batches(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """Places of sequences to score together, the shortest first."""
    batches: list[list[int]] = [[]]
    for place in sorted(range(len(sequences)), key=lambda place: len(sequences[place])):
        if batches[-1] and (len(batches[-1]) + 1) * len(sequences[place]) > SCORED_TOKENS:
            batches.append([])
        batches[-1].append(place)
    return [batch for batch in batches if batch]
