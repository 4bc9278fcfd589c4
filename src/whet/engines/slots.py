"""Keys and values of many sequences at once, one slot a sequence, kept after use for their prefix.

The first `active` slots are being sampled from; the others are idle but remember what they hold,
so that the next turn of a conversation, or another sample of the same prompt, starts from there.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache

SMALLEST_CAPACITY = 64


@dataclass(slots=True)
class Slot:
    """What is known of the keys and values of one row."""

    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """The ids whose keys and values the row holds, from position 0."""
    used: int = 0
    """When it was last active, to forget the oldest first."""


class SlotCache(Cache):
    """A Hugging Face cache whose rows sit at their own positions.

    Set `rows` and `positions_BT` before each forward pass: the new keys and values are written
    there, and attention sees the whole rows; the mask hides what lies beyond each row's position.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.slots: list[Slot] = []
        self.active = 0
        self.capacity = 0
        self.rows: slice | Tensor = slice(0, 0)
        self.positions_BT = torch.empty(0)
        self.length = 0
        """How much of each row attention looks at."""
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **_: object
    ) -> tuple[Tensor, Tensor]:
        if layer_idx == len(self._keys):
            self._keys.append(self._room_like(key_states))
            self._values.append(self._room_like(value_states))
        out: list[Tensor] = []
        for store, new_BHTD in ((self._keys, key_states), (self._values, value_states)):
            cache = store[layer_idx]
            if isinstance(self.rows, slice):
                view_BHLD = cache[self.rows, :, : self.length]
                _write(view_BHLD, new_BHTD, self.positions_BT)
                out.append(view_BHLD)
            else:
                rows_BHLD = cache[self.rows, :, : self.length]
                _write(rows_BHLD, new_BHTD, self.positions_BT)
                cache[self.rows, :, : self.length] = rows_BHLD
                out.append(rows_BHLD)
        return out[0], out[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def capacity_for(self, length: int) -> int:
        """How long slots must be to hold a row of this length: a power of two, never shrinking."""
        return max(SMALLEST_CAPACITY, 1 << length.bit_length(), self.capacity)

    def reserve(self, slots: int, length: int) -> None:
        """Make room for at least this many slots, and a row of this length in each."""
        self.capacity = self.capacity_for(length)
        self.slots += [Slot() for _ in range(slots - len(self.slots))]
        for store in (self._keys, self._values):
            for layer, old in enumerate(store):
                if old.shape[0] < len(self.slots) or old.shape[2] < self.capacity:
                    store[layer] = self._room_like(old)
                    store[layer][: old.shape[0], :, : old.shape[2]] = old

    def drop_idle(self, slots: int) -> None:
        """Give up idle slots beyond this many in all."""
        keep = max(slots, self.active)
        del self.slots[keep:]
        for store in (self._keys, self._values):
            store[:] = [old[:keep].clone() if old.shape[0] > keep else old for old in store]

    def swap(self, a: int, b: int) -> None:
        """Exchange two slots."""
        if a == b:
            return
        self.slots[a], self.slots[b] = self.slots[b], self.slots[a]
        for cache in (*self._keys, *self._values):
            cache[[a, b]] = cache[[b, a]]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give `target` the first `length` positions of `source`."""
        for cache in (*self._keys, *self._values):
            cache[target, :, :length] = cache[source, :, :length]
        self.slots[target].tokens = self.slots[source].tokens[:length]

    def longest_prefix(self, tokens: NDArray[np.int32]) -> tuple[int, int]:
        """(slot, length) of the longest prefix of `tokens` that some slot holds."""
        best, length = 0, 0
        for index, slot in enumerate(self.slots):
            n = common_prefix(slot.tokens, tokens)
            if n > length:
                best, length = index, n
        return best, length

    def forget(self) -> None:
        """The weights changed: no key or value is theirs any more."""
        for slot in self.slots:
            slot.tokens = slot.tokens[:0]

    def _room_like(self, tensor_BHTD: Tensor) -> Tensor:
        _, heads, _, width = tensor_BHTD.shape
        return tensor_BHTD.new_zeros(len(self.slots), heads, self.capacity, width)


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many leading tokens two sequences share."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def _write(rows_BHLD: Tensor, new_BHTD: Tensor, positions_BT: Tensor) -> None:
    """Put each row's new entries at its own positions."""
    index = positions_BT[:, None, :, None].expand_as(new_BHTD)
    rows_BHLD.scatter_(2, index, new_BHTD)
