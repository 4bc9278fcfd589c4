"""Scores tokens with a Hugging Face model in this process, such as a teacher in distillation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import torch
from anyio import to_thread
from numpy.typing import NDArray
from torch import Tensor

from whet.errors import EngineError, boundary
from whet.models.huggingface import LocalPolicy
from whet.protocols import Scorer

MAX_BATCH_TOKENS = 4096
"""Maximum number of padded tokens in one forward pass; bounds its memory."""
CHUNK_LOGITS = 2**26
"""Logits that exist at once, 256 MB: those of all tokens may be tens of gigabytes."""


class ScoreRequest(NamedTuple):
    """Optional outputs for a sequence, besides the log-probabilities of its tokens."""

    top: int = 0
    """How many of the most probable tokens at each position."""
    targets: NDArray[np.int64] | None = None
    """Other tokens to score, (T - 1, K)."""
    samples: int = 0
    """Number of tokens to sample at each position, at `temperature`."""
    temperature: float = 1.0


class TokenScores(NamedTuple):
    """Log-probabilities of the tokens that may follow each token of a sequence but the last."""

    chosen: NDArray[np.float32]
    """Of the token that follows, (T - 1,)."""
    top: tuple[NDArray[np.int64], NDArray[np.float32]]
    """Ids and log-probabilities of the most probable, (T - 1, top)."""
    targets: NDArray[np.float32]
    """Of the requested targets, (T - 1, K)."""
    sampled: tuple[NDArray[np.int64], NDArray[np.float32]]
    """Ids and log-probabilities of sampled tokens, (T - 1, samples)."""


@dataclass(frozen=True, slots=True)
class LocalScorer(Scorer):
    """Plain forward passes over padded sequences of similar lengths."""

    policy: LocalPolicy

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        longest = max(map(len, sequences), default=0)
        if longest > self.policy.context_length:
            raise EngineError(
                f"a sequence has {longest} tokens; the scoring model's context holds "
                f"{self.policy.context_length}"
            )
        return await to_thread.run_sync(self._score_all, sequences)

    async def score(self, tokens: Sequence[int], request: ScoreRequest) -> TokenScores:
        """Score one sequence of valid ids in more detail. Raises EngineError."""
        return await to_thread.run_sync(self._score_one, tokens, request)

    # ----------------------------------------------------------------- in a worker thread

    def _score_all(self, sequences: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        scored: dict[int, tuple[float, ...]] = {}
        with boundary(EngineError, "scoring failed"):
            for indices in _plan_batches(sequences):
                batch = self._forward([sequences[index] for index in indices])
                scored |= zip(indices, batch, strict=True)
        return [scored[index] for index in range(len(sequences))]

    @torch.inference_mode()
    def _forward(self, batch: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        width = max(map(len, batch))
        padded = [[*tokens, *[0] * (width - len(tokens))] for tokens in batch]
        ids_BT = torch.tensor(padded, device=self.policy.device)
        with self.policy.lock:
            # Padding is on the right, where causal attention never looks.
            hidden_BTD = self.policy.body(input_ids=ids_BT, use_cache=False).last_hidden_state
            target_N = ids_BT[:, 1:].flatten()
            chosen = [
                logp_CV.gather(1, target_N[part, None])[:, 0]
                for part, logp_CV in self._compute_chunks(hidden_BTD[:, :-1].flatten(0, 1))
            ]
        chosen_BT = torch.cat([*chosen, ids_BT.new_zeros(0)]).view(len(batch), width - 1)
        rows = zip(cast(list[list[float]], chosen_BT.tolist()), batch, strict=True)
        return [tuple(row[: len(tokens) - 1]) for row, tokens in rows]

    @torch.inference_mode()
    def _score_one(self, tokens: Sequence[int], request: ScoreRequest) -> TokenScores:
        with boundary(EngineError, "scoring failed"):
            ids_1T = torch.tensor([list(tokens)], device=self.policy.device)
            targets = np.zeros((len(tokens) - 1, 0), np.int64)
            if request.targets is not None:
                targets = request.targets
            target_TK = torch.from_numpy(targets).to(ids_1T.device)
            with self.policy.lock:
                body = self.policy.body(input_ids=ids_1T, use_cache=False)
                parts = [
                    _score_chunk(logp_CV, ids_1T[0, 1:][part], target_TK[part], request)
                    for part, logp_CV in self._compute_chunks(body.last_hidden_state[0, :-1])
                ]
        return _join_scores(parts, targets.shape[1], request)

    def _compute_chunks(self, hidden_ND: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Log-probabilities of all tokens after each hidden state, for a chunk at a time."""
        tokens = max(1, CHUNK_LOGITS // self.policy.head.vocabulary)
        for start in range(0, len(hidden_ND), tokens):
            part = slice(start, start + tokens)
            yield part, self.policy.head(hidden_ND[part]).float().log_softmax(-1)


def _score_chunk(
    logp_CV: Tensor, chosen_C: Tensor, target_CK: Tensor, request: ScoreRequest
) -> TokenScores:
    top = logp_CV.topk(request.top, dim=-1)
    sampled_CK = _sample(logp_CV, request)
    return TokenScores(
        chosen=_to_floats(logp_CV.gather(1, chosen_C[:, None])[:, 0]),
        top=(_to_ids(top.indices), _to_floats(top.values)),
        targets=_to_floats(logp_CV.gather(1, target_CK)),
        sampled=(_to_ids(sampled_CK), _to_floats(logp_CV.gather(1, sampled_CK))),
    )


def _join_scores(parts: Sequence[TokenScores], targets: int, request: ScoreRequest) -> TokenScores:
    """Concatenate the scores of consecutive chunks; a sequence of one token has none."""
    none = TokenScores(
        np.zeros(0, np.float32),
        (np.zeros((0, request.top), np.int64), np.zeros((0, request.top), np.float32)),
        np.zeros((0, targets), np.float32),
        (np.zeros((0, request.samples), np.int64), np.zeros((0, request.samples), np.float32)),
    )
    parts = [none, *parts]
    return TokenScores(
        np.concatenate([part.chosen for part in parts]),
        _join_pairs([part.top for part in parts]),
        np.concatenate([part.targets for part in parts]),
        _join_pairs([part.sampled for part in parts]),
    )


def _join_pairs(
    pairs: Sequence[tuple[NDArray[np.int64], NDArray[np.float32]]],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    return (
        np.concatenate([ids for ids, _ in pairs]),
        np.concatenate([logprobs for _, logprobs in pairs]),
    )


def _sample(logp_TV: Tensor, request: ScoreRequest) -> Tensor:
    if not request.samples:
        return torch.zeros(len(logp_TV), 0, dtype=torch.int64, device=logp_TV.device)
    if request.temperature == 0:
        return logp_TV.argmax(-1, keepdim=True).expand(-1, request.samples)
    probs_TV = (logp_TV / request.temperature).softmax(-1)
    # The GPU's global generator must not be used while an engine captures a CUDA graph.
    generator = torch.Generator(probs_TV.device)
    generator.seed()
    return torch.multinomial(probs_TV, request.samples, replacement=True, generator=generator)


def _to_floats(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.float().cpu().numpy()


def _to_ids(tensor: Tensor) -> NDArray[np.int64]:
    return tensor.cpu().numpy()


def _plan_batches(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """Indices of sequences to score together, the shortest first."""
    batches: list[list[int]] = [[]]
    for index in sorted(range(len(sequences)), key=lambda index: len(sequences[index])):
        if batches[-1] and (len(batches[-1]) + 1) * len(sequences[index]) > MAX_BATCH_TOKENS:
            batches.append([])
        batches[-1].append(index)
    return [batch for batch in batches if batch]
