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
from itertools import takewhile

from whet.types import Row

ENOUGH = 256
"""Nodes that fill a pass: beyond them a row that shares less than half starts a new tree."""


@dataclass(slots=True)
class Tree:
    """Some rows, packed."""

    tokens: list[int] = field(default_factory=list[int])
    depth: list[int] = field(default_factory=list[int])
    """Of each node: its position in every row it belongs to."""
    end: list[int] = field(default_factory=list[int])
    """Of each node: one past the last node of its subtree."""
    rows: list[tuple[Row, list[int]]] = field(default_factory=list[tuple[Row, list[int]]])
    """Each row with the node of each of its tokens."""

    def added_by(self, row: Row) -> int:
        """How many nodes the row would add, if it comes next in order."""
        return len(row.tokens) - self._shared(row)

    def add(self, row: Row) -> None:
        """Add a row; rows come sorted by their tokens."""
        shared = self._shared(row)
        nodes = self.rows[-1][1][:shared] if self.rows else []
        for depth in range(shared, len(row.tokens)):
            nodes.append(len(self.tokens))
            self.tokens.append(row.tokens[depth])
            self.depth.append(depth)
            self.end.append(0)
        for node in nodes:
            self.end[node] = len(self.tokens)
        self.rows.append((row, nodes))

    def _shared(self, row: Row) -> int:
        if not self.rows:
            return 0
        pairs = zip(self.rows[-1][0].tokens, row.tokens, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def pack(rows: Sequence[Row], most_tokens: int) -> Iterable[Tree]:
    """The rows in trees of at most `most_tokens` nodes; a longer row has its own.

    Attention is computed between all nodes of a tree, so strangers only share one while it is
    small.
    """
    tree = Tree()
    for row in sorted(rows, key=lambda row: row.tokens):
        added = tree.added_by(row)
        stranger = len(tree.tokens) >= ENOUGH and 2 * added > len(row.tokens)
        if tree.rows and (stranger or len(tree.tokens) + added > most_tokens):
            yield tree
            tree = Tree()
        tree.add(row)
    if tree.rows:
        yield tree
