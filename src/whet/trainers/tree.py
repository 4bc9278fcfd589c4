"""Packs rows into one sequence in which every shared prefix stands once.

The rows of a group share their prompt, and often whole turns. Sorted by tokens they form a tree;
its nodes in depth-first order are the packed sequence. A node attends to its ancestors, and with
`end` one past the last node of its subtree that is a comparison:

    key k is an ancestor of query q, or q itself   <=>   k <= q < end[k]

Every node has the position it has in its rows, so the forward pass gives each row exactly what it
would get alone, and gradients of shared tokens add up by themselves.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whet.policies.attention import Branches

ENOUGH = 256
"""Nodes that fill a pass where a mask is used: beyond them a row that shares less than half starts
a new tree, since attention is then computed between all nodes of one."""

Nodes = NDArray[np.int64]


class Tokens(Protocol):
    """What can be packed: a sequence of tokens, with anything else."""

    @property
    def tokens(self) -> tuple[int, ...]: ...


R = TypeVar("R", bound=Tokens)


@dataclass(slots=True)
class Tree(Generic[R]):
    """Some rows, packed."""

    size: int = 0
    """How many nodes it has."""
    rows: list[tuple[R, Nodes]] = field(default_factory=list[tuple[R, Nodes]])
    """Each row with the node of each of its tokens."""
    _tokens: list[Nodes] = field(default_factory=list[Nodes])
    """Of each row."""
    _added: list[int] = field(default_factory=list[int])
    """How many nodes each row added: its last ones."""

    def add(self, row: R, tokens: Nodes, shared: int) -> None:
        """Add a row; rows come sorted by their tokens."""
        known = self.rows[-1][1][:shared] if self.rows else np.empty(0, np.int64)
        fresh = np.arange(self.size, self.size + len(tokens) - shared)
        self.rows.append((row, np.concatenate([known, fresh])))
        self.size += len(fresh)
        self._tokens.append(tokens)
        self._added.append(len(fresh))

    def shared(self, tokens: Nodes) -> int:
        """How many of its tokens a row would share, if it comes next in order."""
        if not self._tokens:
            return 0
        length = min(len(self._tokens[-1]), len(tokens))
        differs = np.flatnonzero(self._tokens[-1][:length] != tokens[:length])
        return int(differs[0]) if len(differs) else length

    @property
    def tokens(self) -> Nodes:
        """The id of each node."""
        return self._fresh(self._tokens)

    @property
    def depth(self) -> Nodes:
        """Of each node: its position in every row it belongs to."""
        return self._fresh([np.arange(len(nodes)) for _, nodes in self.rows])

    @property
    def end(self) -> Nodes:
        """Of each node: one past the last node of its subtree."""
        end = np.zeros(self.size, np.int64)
        size = 0
        for (_, nodes), added in zip(self.rows, self._added, strict=True):
            size += added
            end[nodes] = size
        return end

    def mask(self, device: torch.device) -> Tensor:
        """Which key each query sees."""
        node_L = torch.arange(self.size, device=device)
        end_L = torch.from_numpy(self.end).to(device)
        return (node_L[None, :] <= node_L[:, None]) & (node_L[:, None] < end_L[None, :])

    def branches(self, device: torch.device) -> Branches:
        """The same without a square: each run of fresh nodes with the row it ends."""
        runs = [(n, nodes) for n, (_, nodes) in zip(self._added, self.rows, strict=True) if n]
        return Branches.of(runs, device)

    def _fresh(self, values: Sequence[NDArray[np.int64]]) -> Nodes:
        last = [one[len(one) - n :] for one, n in zip(values, self._added, strict=True)]
        return np.concatenate(last, dtype=np.int64)


def pack(rows: Sequence[R], most_tokens: int, *, enough: int = ENOUGH) -> Iterable[Tree[R]]:
    """The rows in trees of at most `most_tokens` nodes; a longer row has its own.

    Strangers share a tree only while it has fewer than `enough` nodes.
    """
    tree = Tree[R]()
    arrays = [(row, np.fromiter(row.tokens, np.int64, len(row.tokens))) for row in rows]
    # As bytes, the highest first, long prefixes are compared at once.
    arrays.sort(key=lambda pair: pair[1].astype(">i8").tobytes())
    for row, tokens in arrays:
        shared = tree.shared(tokens)
        added = len(tokens) - shared
        stranger = tree.size >= enough and 2 * added > len(tokens)
        if tree.rows and (stranger or tree.size + added > most_tokens):
            yield tree
            tree, shared = Tree[R](), 0
        tree.add(row, tokens, shared)
    if tree.rows:
        yield tree
