"""Scores tokens with a Hugging Face model in this process: a teacher that is never trained."""

from collections.abc import Sequence

import torch
from anyio import to_thread

from whet.errors import EngineError, boundary
from whet.policies.local import LocalPolicy
from whet.protocols import Scorer

SCORED_TOKENS = 4096
"""Most padded tokens in one forward pass; bounds its memory."""


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


def _batches(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """Places of sequences to score together, the shortest first."""
    batches: list[list[int]] = [[]]
    for place in sorted(range(len(sequences)), key=lambda place: len(sequences[place])):
        if batches[-1] and (len(batches[-1]) + 1) * len(sequences[place]) > SCORED_TOKENS:
            batches.append([])
        batches[-1].append(place)
    return [batch for batch in batches if batch]
