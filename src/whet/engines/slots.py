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


class SlotCache(Cache):
    """A Hugging Face cache whose rows sit at their own positions.

    Set `rows`, `positions_BT` and `seen` before each forward pass: the new keys and values are
    written there, and attention sees the rows; a mask hides what lies beyond each row's position.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.active = 0
        self.capacity = 0
        self.tokens_SL: NDArray[np.int32] = np.empty((0, 0), np.int32)
        """The ids whose keys and values each slot holds, from position 0."""
        self.length_S: NDArray[np.int64] = np.empty(0, np.int64)
        self.used_S: NDArray[np.int64] = np.empty(0, np.int64)
        """When each slot was last active, to forget the oldest first."""
        self.rows: slice | Sequence[int] = ()
        self.positions_BT = torch.empty(0)
        self.seen = 0
        """How many columns of each row attention looks at."""
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    @property
    def slots(self) -> int:
        return len(self.length_S)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **_: object
    ) -> tuple[Tensor, Tensor]:
        if layer_idx == len(self._keys):
            self._keys.append(self._room_like(key_states))
            self._values.append(self._room_like(value_states))
        return (
            self._write(self._keys[layer_idx], key_states),
            self._write(self._values[layer_idx], value_states),
        )

    def _write(self, cache_SHLD: Tensor, new_BHTD: Tensor) -> Tensor:
        """Put each row's new entries at its own positions; returns the rows."""
        rows_BHLD = cache_SHLD[self.rows, :, : self.seen]
        index_BHTD = self.positions_BT[:, None, :, None].expand_as(new_BHTD)
        rows_BHLD.scatter_(2, index_BHTD, new_BHTD)
        if not isinstance(self.rows, slice):  # then they are a copy
            cache_SHLD[self.rows, :, : self.seen] = rows_BHLD
        return rows_BHLD

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
        self.capacity = capacity
        tokens_SL = np.full((slots, capacity), NOTHING, np.int32)
        tokens_SL[: len(keep), :columns] = self.tokens_SL[keep, :columns]
        self.tokens_SL = tokens_SL
        grown = (0, slots - len(keep))
        self.length_S = np.pad(self.length_S[keep].clip(max=columns), grown)
        self.used_S = np.pad(self.used_S[keep], grown)
        for store in (self._keys, self._values):
            for layer, old in enumerate(store):
                store[layer] = self._room_like(old)
                store[layer][: len(keep), :, :columns] = old[keep, :, :columns]

    def extend(self, rows: Sequence[int], news: Sequence[Sequence[int]]) -> None:
        """Note that these rows now hold these tokens too."""
        for row, new in zip(rows, news, strict=True):
            start = self.length_S[row]
            self.tokens_SL[row, start : start + len(new)] = new
            self.length_S[row] += len(new)

    def swap(self, a: int, b: int) -> None:
        """Exchange two slots."""
        if a == b:
            return
        columns = int(max(self.length_S[a], self.length_S[b]))
        for cache in (*self._keys, *self._values):
            cache[[a, b], :, :columns] = cache[[b, a], :, :columns]
        for array in (self.tokens_SL, self.length_S, self.used_S):
            array[[a, b]] = array[[b, a]]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give `target` the first `length` positions of `source`, and nothing else."""
        if source != target:
            for cache in (*self._keys, *self._values):
                cache[target, :, :length] = cache[source, :, :length]
            self.tokens_SL[target, :length] = self.tokens_SL[source, :length]
        self.tokens_SL[target, length:] = NOTHING
        self.length_S[target] = length

    def longest_prefix(self, tokens: NDArray[np.int32]) -> tuple[int, int]:
        """(slot, length) of the longest prefix of `tokens` that some slot holds."""
        if not self.slots:
            return 0, 0
        n = min(len(tokens), self.capacity)
        same_SN = self.tokens_SL[:, :n] == tokens[:n]
        prefix_S = np.where(same_SN.all(axis=1), n, same_SN.argmin(axis=1))
        best = int(prefix_S.argmax())
        return best, int(prefix_S[best])

    def forget(self) -> None:
        """The weights changed: no key or value is theirs any more."""
        self.tokens_SL = np.full((self.active, self.capacity), NOTHING, np.int32)
        self.length_S = np.zeros(self.active, np.int64)
        self.used_S = self.used_S[: self.active]
        # A masked column still takes part with weight zero, so a NaN must not outlive its weights.
        self._keys.clear()
        self._values.clear()

    def _room_like(self, tensor_BHTD: Tensor) -> Tensor:
        _, heads, _, width = tensor_BHTD.shape
        return tensor_BHTD.new_zeros(self.slots, heads, self.capacity, width)


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many leading tokens two sequences share."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n
