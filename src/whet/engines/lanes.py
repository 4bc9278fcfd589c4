"""What the rows being sampled need at every step, in arrays: most steps touch no request.

At a thousand rows a step of the model takes four milliseconds, and so would a little Python for
each row. Tokens are kept here until somebody waits for them: at the end, or, for a row that is
watched, at once.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from whet.engines.request import Drawn, Request
from whet.policies.distribution import Shaping

R = TypeVar("R", bound=Request)

STOP_IDS = 8
"""Stop ids compared in arrays; a request with more is watched."""
KEPT = 128
"""Tokens of a row that are kept back; a longer answer is handed over in parts."""
NO_ID = -1

_ROW = np.dtype(
    [
        ("last", np.int64),  # the newest token, which the next step begins with
        ("total", np.int64),  # tokens of prompt and answer
        ("end", np.int64),  # the total at which it has as many as it may
        ("drawn", np.int64),  # tokens sampled
        ("seed", np.uint64),
        ("watched", np.bool_),  # every token of it is looked at
        ("stop", np.int64, STOP_IDS),
        ("kept", np.int64),  # how many of the following are in use
        ("tokens", np.int32, KEPT),
        ("logprobs", np.float32, KEPT),
    ]
)


class Lanes(Generic[R]):
    """The active requests, in the order of their slots."""

    def __init__(self) -> None:
        self.requests: list[R] = []
        self._table = np.zeros(0, _ROW)
        self._shaping: Shaping | None = None

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def last_B(self) -> NDArray[np.int64]:
        """The newest token of each row."""
        return self._rows["last"]

    @property
    def total_B(self) -> NDArray[np.int64]:
        """Tokens of prompt and answer of each row."""
        return self._rows["total"]

    @property
    def drawn_B(self) -> NDArray[np.int64]:
        """Tokens sampled for each row."""
        return self._rows["drawn"]

    @property
    def any_watched(self) -> bool:
        """Whether some row wants more than tokens."""
        return bool(self._rows["watched"].any())

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(self.total_B.max(initial=0))

    def add(self, request: R) -> None:
        """Make a request the last row."""
        if len(self.requests) == len(self._table):
            more = np.zeros(max(16, len(self._table)), _ROW)
            self._table = np.concatenate([self._table, more])
        row = self._table[len(self.requests)]
        self.requests.append(request)
        ids = request.sampling.stop_ids
        row["last"], row["total"] = request.tokens[-1], len(request.tokens)
        row["drawn"] = len(request.logprobs)
        row["end"] = len(request.tokens) - len(request.logprobs) + request.limit
        row["seed"] = request.seed
        row["watched"] = request.watched or len(ids) > STOP_IDS
        row["stop"] = NO_ID
        row["stop"][: len(ids[:STOP_IDS])] = ids[:STOP_IDS]
        row["kept"] = 0
        self._shaping = None

    def reorder(self, order: Sequence[int]) -> None:
        """Row `i` becomes what row `order[i]` was; rows not named leave."""
        self._table[: len(order)] = self._table[list(order)]
        self.requests = [self.requests[row] for row in order]
        self._shaping = None

    def points(self) -> NDArray[np.float64]:
        """A random number in [0, 1) for the next token of each row."""
        return points(self._rows["seed"], self._rows["drawn"])

    def shaping(self, device: torch.device) -> Shaping:
        """How each row's logits are shaped."""
        if self._shaping is None:
            samplings = [request.sampling for request in self.requests]
            settings = [(s.temperature, s.top_p, s.top_k) for s in samplings]
            self._shaping = Shaping.of(settings, device)
        return self._shaping

    def record(
        self, token_B: NDArray[np.int64], logprob_B: NDArray[np.float32]
    ) -> NDArray[np.int64]:
        """Take a token for each row; returns the rows to look at."""
        rows = self._rows
        at_B = np.arange(len(rows)), rows["kept"]
        rows["tokens"][at_B] = token_B
        rows["logprobs"][at_B] = logprob_B
        rows["last"] = token_B
        for count in ("kept", "total", "drawn"):
            rows[count] += 1
        due_B = rows["watched"] | (rows["total"] >= rows["end"]) | (rows["kept"] == KEPT)
        due_B |= (rows["stop"] == token_B[:, None]).any(axis=1)
        return np.flatnonzero(due_B)

    def hand_over(self, row: int) -> Drawn:
        """What a row has kept back."""
        kept = self._rows[row]["kept"]
        tokens = self._rows["tokens"][row, :kept].tolist()
        logprobs = self._rows["logprobs"][row, :kept].tolist()
        self._rows["kept"][row] = 0
        return Drawn(tokens, logprobs)

    @property
    def _rows(self) -> NDArray[np.void]:
        return self._table[: len(self.requests)]


def points(seed_B: NDArray[np.uint64], index_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """The random number of each seed and index: SplitMix64 (doi:10.1145/2714064.2660195).

    A function of both alone, so that a row draws the same whoever else is in the batch.
    """
    step = np.uint64(0x9E3779B97F4A7C15)
    state_B = _scramble(seed_B + step) + (index_B.astype(np.uint64) + np.uint64(1)) * step
    return (_scramble(state_B) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _scramble(z_B: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z_B = (z_B ^ (z_B >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z_B = (z_B ^ (z_B >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z_B ^ (z_B >> np.uint64(31))
