"""Prefix-tree packing: rows in one sequence that holds every shared prefix once.

The rows of a group share their prompt, and often whole turns. Sorted by tokens they form a tree;
its nodes in depth-first order are the packed sequence. A node attends to its ancestors, and with
`end` one past the last node of its subtree that is a comparison:

    key k is an ancestor of query q, or q itself   <=>   k <= q < end[k]

Every node has the position it has in its rows, so the forward pass gives each row exactly what it
would get alone, and gradients of shared tokens add up by themselves.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whet.errors import NonFiniteUpdate, TrainerError
from whet.models.distribution import SamplingTransform
from whet.models.tree_attention import Branches
from whet.types import Row

MASKED_TREE_NODES = 256
"""Tree size from which a row that shares less than half of its tokens starts a new tree, where
attention uses a mask: its cost is the square of the tree's size."""

LARGEST = torch.finfo(torch.float32).max

Nodes = NDArray[np.int64]


class Packable(Protocol):
    """Anything with a token sequence."""

    @property
    def tokens(self) -> tuple[int, ...]: ...


R = TypeVar("R", bound=Packable)


@dataclass(slots=True)
class PrefixTree(Generic[R]):
    """Packed rows."""

    size: int = 0
    """Number of nodes."""
    rows: list[tuple[R, Nodes]] = field(default_factory=list[tuple[R, Nodes]])
    """Each row with the node of each of its tokens."""
    _tokens: list[Nodes] = field(default_factory=list[Nodes])
    """Token ids of each row."""
    _added: list[int] = field(default_factory=list[int])
    """Nodes each row added: its last ones."""

    def add(self, row: R, tokens: Nodes, shared: int) -> None:
        """Add a row whose first `shared` tokens are those of the previous row.

        Rows must be added sorted by their tokens.
        """
        prefix = self.rows[-1][1][:shared] if self.rows else np.empty(0, np.int64)
        fresh = np.arange(self.size, self.size + len(tokens) - shared)
        self.rows.append((row, np.concatenate([prefix, fresh])))
        self.size += len(fresh)
        self._tokens.append(tokens)
        self._added.append(len(fresh))

    def count_shared(self, tokens: Nodes) -> int:
        """Length of the prefix that these tokens share with the last row."""
        if not self._tokens:
            return 0
        length = min(len(self._tokens[-1]), len(tokens))
        differs = np.flatnonzero(self._tokens[-1][:length] != tokens[:length])
        return int(differs[0]) if len(differs) else length

    @property
    def tokens(self) -> Nodes:
        """Token id of each node."""
        return self._select_added(self._tokens)

    @property
    def depth(self) -> Nodes:
        """Depth of each node, which is its position in every row it belongs to."""
        return self._select_added([np.arange(len(nodes)) for _, nodes in self.rows])

    @property
    def end(self) -> Nodes:
        """One past the last node of each node's subtree."""
        end = np.zeros(self.size, np.int64)
        size = 0
        for (_, nodes), added in zip(self.rows, self._added, strict=True):
            size += added
            end[nodes] = size
        return end

    def build_mask(self, device: torch.device) -> Tensor:
        """Build the attention mask: whether each query (dim 0) sees each key (dim 1)."""
        node_L = torch.arange(self.size, device=device)
        end_L = torch.from_numpy(self.end).to(device)
        return (node_L[None, :] <= node_L[:, None]) & (node_L[:, None] < end_L[None, :])

    def build_branches(self, device: torch.device) -> Branches:
        """Build the same structure for variable-length attention, without a square mask."""
        runs = [(n, nodes) for n, (_, nodes) in zip(self._added, self.rows, strict=True) if n]
        return Branches.from_runs(runs, device)

    def _select_added(self, values: Sequence[Nodes]) -> Nodes:
        """From one value per token of each row, those of the nodes the row added."""
        last = [one[len(one) - n :] for one, n in zip(values, self._added, strict=True)]
        return np.concatenate(last, dtype=np.int64)


def pack(
    rows: Sequence[R], max_tokens: int, *, enough: int = MASKED_TREE_NODES
) -> Iterable[PrefixTree[R]]:
    """Pack rows into trees of at most `max_tokens` nodes; a longer row has its own.

    Rows that share less than half of their tokens join a tree only below `enough` nodes.
    """
    tree = PrefixTree[R]()
    arrays = [(row, np.fromiter(row.tokens, np.int64, len(row.tokens))) for row in rows]
    # As big-endian bytes, long prefixes compare at once.
    arrays.sort(key=lambda pair: pair[1].astype(">i8").tobytes())
    for row, tokens in arrays:
        shared = tree.count_shared(tokens)
        added = len(tokens) - shared
        unrelated = tree.size >= enough and 2 * added > len(tokens)
        if tree.rows and (unrelated or tree.size + added > max_tokens):
            yield tree
            tree, shared = PrefixTree[R](), 0
        tree.add(row, tokens, shared)
    if tree.rows:
        yield tree


def check_rows(rows: Sequence[Row]) -> None:
    """Raise TrainerError for rows that cannot be trained, NonFiniteUpdate for their numbers."""
    for row in rows:
        if not row.trained_tokens:
            raise TrainerError(f"a row of rollout {row.rollout!r} has no sampled tokens")
        for segment in row.segments:
            numbers = *segment.logprobs, *segment.advantages, segment.weight
            if not all(abs(number) <= LARGEST for number in numbers):  # not so for NaN
                raise NonFiniteUpdate(
                    f"generation {segment.generation!r} has a log-probability, advantage or weight "
                    "that is not finite in fp32: nothing was changed"
                )
            if segment.start < 1:
                raise TrainerError(f"generation {segment.generation!r} has no context")


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of the losses besides the model's scores: one entry per sampled token of each row."""

    source_N: Tensor
    """The node that predicts each token."""
    target_N: Tensor
    row_N: Tensor
    """The row of the tree each token belongs to."""
    rows: int
    version_N: Tensor
    """Policy version that sampled each token."""
    sampled_N: Tensor
    """Log-probability when it was sampled."""
    advantage_N: Tensor
    weight_N: Tensor
    """Weight of a token in the loss, which is a plain sum."""
    transform: SamplingTransform
    old_N: Tensor | None = None
    """Log-probability before the first update of a step, where it was computed."""
    counted_N: Tensor | None = None
    """Which tokens make up the ratio of a row; all of them if absent."""
    clip_N: tuple[Tensor, Tensor] | None = None
    """Least and largest ratio of each token, instead of the loss's range for all."""

    @classmethod
    def from_tree(cls, tree: PrefixTree[Row]) -> "Batch":
        """Build from the sampled tokens of a tree, in host memory."""
        segments = [
            (i, nodes, row, s) for i, (row, nodes) in enumerate(tree.rows) for s in row.segments
        ]
        count_S = np.array([len(segment.logprobs) for *_, segment in segments])
        settings = [(segment.temperature, segment.top_p, segment.top_k) for *_, segment in segments]

        def join_integers(values: Iterable[Iterable[int]]) -> Tensor:
            return torch.from_numpy(np.fromiter(chain.from_iterable(values), np.int64))

        def join_floats(values: Iterable[Iterable[float]]) -> Tensor:
            return torch.from_numpy(np.fromiter(chain.from_iterable(values), np.float32))

        def repeat_per_token(
            values: list[float], dtype: type[np.float32] | type[np.int64]
        ) -> Tensor:
            return torch.from_numpy(np.repeat(np.array(values, dtype), count_S))

        # The token at position p is predicted by the node at p - 1.
        sources = [nodes[s.start - 1 : s.end - 1] for _, nodes, _, s in segments]
        old = [segment.old_logprobs for *_, segment in segments]
        return cls(
            source_N=torch.from_numpy(np.concatenate(sources)),
            target_N=join_integers(row.tokens[s.start : s.end] for _, _, row, s in segments),
            row_N=repeat_per_token([index for index, *_ in segments], np.int64),
            rows=len(tree.rows),
            version_N=join_integers(segment.versions for *_, segment in segments),
            sampled_N=join_floats(segment.logprobs for *_, segment in segments),
            advantage_N=join_floats(segment.advantages for *_, segment in segments),
            weight_N=repeat_per_token([segment.weight for *_, segment in segments], np.float32),
            old_N=None
            if None in old
            else join_floats(values for values in old if values is not None),
            transform=SamplingTransform.from_settings(settings, "cpu").select(
                repeat_per_token([*range(len(segments))], np.int64)
            ),
        )

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device's memory."""
        return Batch(
            source_N=self.source_N.to(device),
            target_N=self.target_N.to(device),
            row_N=self.row_N.to(device),
            rows=self.rows,
            version_N=self.version_N.to(device),
            sampled_N=self.sampled_N.to(device),
            advantage_N=self.advantage_N.to(device),
            weight_N=self.weight_N.to(device),
            transform=self.transform.to(device),
            old_N=None if self.old_N is None else self.old_N.to(device),
            counted_N=None if self.counted_N is None else self.counted_N.to(device),
            clip_N=self.clip_N and (self.clip_N[0].to(device), self.clip_N[1].to(device)),
        )
