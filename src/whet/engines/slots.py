"""Keys and values of many sequences at once, one slot a sequence, kept after use for their prefix.

The first `active` slots are being sampled from; the others are idle but remember what they hold,
so that the next turn of a conversation, or another sample of the same prompt, starts from there.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache

NOTHING = -1
"""Stands in `tokens_SL` where a slot holds no token; equal to no id."""

MOVED_AT_ONCE = 2**26
"""Elements of keys or values that are copied aside at a time; bounds the memory it takes."""


class SlotCache(Cache):
    """A Hugging Face cache over one pool of positions, of which each slot has `capacity` in a row.

    Set `index_N`, and `rows` and `seen` where attention gets whole rows, before each forward pass:
    the new keys and values are written to those places of the pool. One place beyond all slots
    takes what is computed only because tensors are rectangles.
    """

    def __init__(self, positions: int = 0, layers: int = 1) -> None:
        """With `positions` the pool has that many for good and never moves in memory.

        It is then one tensor for so many `layers`: whatever moves slots is one kernel, not many.
        """
        super().__init__(layers=[])
        self.positions = positions
        self._blocks_of = 2 * layers if positions else 1
        self.active = 0
        self.capacity = 0
        self.tokens_SL: NDArray[np.int32] = np.empty((0, 0), np.int32)
        """The ids whose keys and values each slot holds, from position 0."""
        self.length_S: NDArray[np.int64] = np.empty(0, np.int64)
        self.used_S: NDArray[np.int64] = np.empty(0, np.int64)
        """When each slot was last active, to forget the oldest first."""
        self.rows: slice | Sequence[int] | None = None
        """Whose keys and values a layer is given; None gives it the pool, to find its own."""
        self.index_N = torch.empty(0)
        """Where in the pool new keys and values go."""
        self.seen = 0
        """How many columns of each row attention looks at."""
        self._blocks: list[Tensor] = []
        """The memory: (X, P, H, D), of one or more layers' keys or values."""
        self._pools: list[Tensor] = []
        """Keys and values of each layer in turn: (P, H, D), parts of the blocks."""

    @property
    def slots(self) -> int:
        return len(self.length_S)

    @property
    def spare(self) -> int:
        """The place of the pool that belongs to no slot."""
        return self.positions or self.slots * self.capacity

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **_: object
    ) -> tuple[Tensor, Tensor]:
        while len(self._pools) < 2 * layer_idx + 2:
            self._add_block(key_states, heads=key_states.shape[1])
        return (
            self._write(self._pools[2 * layer_idx], key_states),
            self._write(self._pools[2 * layer_idx + 1], value_states),
        )

    def _add_block(self, like: Tensor, *, heads: int) -> None:
        block_XPHD = like.new_zeros(self._blocks_of, self.spare + 1, heads, like.shape[-1])
        self._blocks.append(block_XPHD)
        self._pools += block_XPHD.unbind()

    def _write(self, pool_PHD: Tensor, new_BHTD: Tensor) -> Tensor:
        pool_PHD.index_copy_(0, self.index_N, new_BHTD.transpose(1, 2).flatten(0, 1))
        if self.rows is None:
            return pool_PHD
        slots_SLHD = _by_slot(pool_PHD, self.slots, self.capacity)
        return slots_SLHD[self.rows, : self.seen].transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def resize(self, slots: int, capacity: int) -> None:
        """Hold so many slots of this capacity.

        Where slots have to go, the idle ones that were used longest ago do; where the capacity
        shrinks, what is longer keeps the prefix that fits.
        """
        idle = sorted(range(self.active, self.slots), key=lambda slot: -self.used_S[slot])
        keep = [*range(self.active), *idle][:slots]
        columns = min(capacity, self.capacity)
        held = int(self.length_S[keep].clip(max=columns).max(initial=0))
        before, slots_before = self._blocks, (self.slots, self.capacity)
        tokens_SL = np.full((slots, capacity), NOTHING, np.int32)
        tokens_SL[: len(keep), :columns] = self.tokens_SL[keep, :columns]
        self.tokens_SL = tokens_SL
        grown = (0, slots - len(keep))
        self.length_S = np.pad(self.length_S[keep].clip(max=columns), grown)
        self.used_S = np.pad(self.used_S[keep], grown)
        self.capacity = capacity
        if not self.positions:
            self._blocks, self._pools = [], []
            for block_XPHD in before:
                self._add_block(block_XPHD, heads=block_XPHD.shape[-2])
        for old_XPHD, new_XPHD in zip(before, self._blocks, strict=True):
            self._move(old_XPHD, slots_before, keep, new_XPHD, range(len(keep)), held)

    def _move(
        self,
        old_XPHD: Tensor,
        slots_before: tuple[int, int],
        sources: Sequence[int],
        new_XPHD: Tensor,
        targets: Sequence[int],
        columns: int,
    ) -> None:
        """Copy the beginnings of slots, all at once: they may overlap in any way."""
        if not columns or not len(sources):
            return
        olds = _by_slot(old_XPHD, *slots_before)
        news = _by_slot(new_XPHD, self.slots, self.capacity)
        source_M, target_M = (torch.tensor(i, device=news.device) for i in (sources, targets))
        size = len(sources) * columns * olds.shape[-1] * olds.shape[-2]
        some = max(1, MOVED_AT_ONCE // size)
        for first in range(0, len(olds), some):
            part = slice(first, first + some)
            news[part, target_M, :columns] = olds[part, source_M, :columns]

    def extend(self, rows: Sequence[int], news: Sequence[Sequence[int]]) -> None:
        """Note that these rows now hold these tokens too."""
        for row, new in zip(rows, news, strict=True):
            start = self.length_S[row]
            self.tokens_SL[row, start : start + len(new)] = new
            self.length_S[row] += len(new)

    def extend_active(self, token_B: NDArray[np.int64]) -> None:
        """Note that every active row now holds one more token."""
        rows = np.arange(self.active)
        self.tokens_SL[rows, self.length_S[: self.active]] = token_B
        self.length_S[: self.active] += 1

    def reorder(self, order_S: Sequence[int]) -> None:
        """Slot `i` becomes what slot `order_S[i]` was, for the first slots."""
        order = np.asarray(order_S, np.int64)
        moved = np.flatnonzero(order != np.arange(len(order)))
        if not len(moved):
            return
        sources = order[moved]
        columns = int(self.length_S[moved].max())
        for block_XPHD in self._blocks:
            slots = (self.slots, self.capacity)
            self._move(block_XPHD, slots, sources.tolist(), block_XPHD, moved.tolist(), columns)
        for array in (self.tokens_SL, self.length_S, self.used_S):
            array[moved] = array[sources]

    def swap(self, a: int, b: int) -> None:
        """Exchange two slots."""
        if a == b:
            return
        order = list(range(max(a, b) + 1))
        order[a], order[b] = b, a
        self.reorder(order)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give `target` the first `length` positions of `source`, and nothing else."""
        if source != target:
            for block_XPHD in self._blocks:
                slots_XSLHD = _by_slot(block_XPHD, self.slots, self.capacity)
                slots_XSLHD[:, target, :length] = slots_XSLHD[:, source, :length]
            self.tokens_SL[target, :length] = self.tokens_SL[source, :length]
        self.tokens_SL[target, length:] = NOTHING
        self.length_S[target] = length

    def longest_prefix(self, tokens: NDArray[np.int32]) -> tuple[int, int]:
        """(slot, length) of the longest prefix of `tokens` that some slot holds."""
        return longest_prefix(self.tokens_SL, tokens)

    def forget(self) -> None:
        """The weights changed: no key or value is theirs any more."""
        slots = self.slots if self.positions else self.active
        self.tokens_SL = np.full((slots, self.capacity), NOTHING, np.int32)
        self.length_S = np.zeros(slots, np.int64)
        self.used_S = self.used_S[:slots]
        # A masked column still takes part with weight zero, so a NaN must not outlive its weights.
        if self.positions:
            for block_XPHD in self._blocks:
                block_XPHD.zero_()
        else:
            self._blocks, self._pools = [], []


def _by_slot(pool: Tensor, slots: int, capacity: int) -> Tensor:
    """The slots of one or more pools: (..., S, L, H, D)."""
    used = pool[..., : slots * capacity, :, :]
    return used.view(*pool.shape[:-3], slots, capacity, *pool.shape[-2:])


def longest_prefix(rows_SL: NDArray[np.int32], tokens: NDArray[np.int32]) -> tuple[int, int]:
    """(row, length) of the longest prefix of `tokens` that some row begins with."""
    n = min(len(tokens), rows_SL.shape[1])
    if not len(rows_SL) or not n:
        return 0, 0
    same_SN = rows_SL[:, :n] == tokens[:n]
    prefix_S = np.where(same_SN.all(axis=1), n, same_SN.argmin(axis=1))
    best = int(prefix_S.argmax())
    return best, int(prefix_S[best])
