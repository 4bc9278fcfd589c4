"""The sampled tokens of a tree, flat: one entry for each token of each row that trains it."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from whet.policies.distribution import Shaping
from whet.trainers.tree import Tree
from whet.types import Row


@dataclass(frozen=True, slots=True)
class Batch:
    """What the losses are made of, besides the model's own scores."""

    source_N: Tensor
    """The node that predicts each token."""
    target_N: Tensor
    row_N: Tensor
    """Which row of the tree each token belongs to."""
    rows: int
    version_N: Tensor
    sampled_N: Tensor
    """Log-probability when it was sampled."""
    advantage_N: Tensor
    weight_N: Tensor
    """What a token counts in the loss, which is a plain sum."""
    shaping: Shaping
    counted_N: Tensor | None = None
    """Which tokens make up the ratio of a row; all of them if absent."""

    @classmethod
    def of(cls, tree: Tree[Row]) -> "Batch":
        """In the host's memory."""
        spans = [(i, nodes, row, s) for i, (row, nodes) in enumerate(tree.rows) for s in row.spans]
        count_S = np.array([len(span.logprobs) for *_, span in spans])
        settings = [(span.temperature, span.top_p, span.top_k) for *_, span in spans]

        def integers(values: Iterable[Iterable[int]]) -> Tensor:
            return torch.from_numpy(np.fromiter(chain.from_iterable(values), np.int64))

        def floats(values: Iterable[Iterable[float]]) -> Tensor:
            return torch.from_numpy(np.fromiter(chain.from_iterable(values), np.float32))

        def each(values: list[float], dtype: type[np.float32] | type[np.int64]) -> Tensor:
            return torch.from_numpy(np.repeat(np.array(values, dtype), count_S))

        sources = [nodes[s.start - 1 : s.end - 1] for _, nodes, _, s in spans]
        return cls(
            source_N=torch.from_numpy(np.concatenate(sources)),
            target_N=integers(row.tokens[s.start : s.end] for _, _, row, s in spans),
            row_N=each([index for index, *_ in spans], np.int64),
            rows=len(tree.rows),
            version_N=integers(span.versions for *_, span in spans),
            sampled_N=floats(span.logprobs for *_, span in spans),
            advantage_N=floats(span.advantages for *_, span in spans),
            weight_N=each([span.weight for *_, span in spans], np.float32),
            shaping=Shaping.of(settings, "cpu").part(each([*range(len(spans))], np.int64)),
        )

    def to(self, device: torch.device) -> "Batch":
        """The same in a device's memory."""
        return Batch(
            source_N=self.source_N.to(device),
            target_N=self.target_N.to(device),
            row_N=self.row_N.to(device),
            rows=self.rows,
            version_N=self.version_N.to(device),
            sampled_N=self.sampled_N.to(device),
            advantage_N=self.advantage_N.to(device),
            weight_N=self.weight_N.to(device),
            shaping=self.shaping.to(device),
            counted_N=None if self.counted_N is None else self.counted_N.to(device),
        )
