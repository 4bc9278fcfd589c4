"""The running batch: the KV cache of its rows, and their sampling state in NumPy arrays.

The first `active` rows of the KV cache are the running batch, in the same order; the other rows are
idle but keep what they hold, so that the next turn of a conversation, or another sample of the same
prompt, starts from its prefix.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache

from whet.engines.request import SampledTokens, SampleRequest
from whet.models.distribution import SamplingTransform

R = TypeVar("R", bound=SampleRequest)

NO_TOKEN = -1
"""Value of `tokens_SL` where a row holds no token; no token has this id."""
COPY_ELEMENTS = 2**26
"""Keys or values that are copied at a time; bounds the memory of a copy."""

MAX_STOP_IDS = 8
"""Stop ids compared in arrays; a request with more is processed at every token."""
BUFFERED_TOKENS = 128
"""Sampled tokens of a row that are buffered before they are given to its request."""


class KVCache(Cache):
    """A Hugging Face cache over one pool of positions, of which each row has `capacity`.

    Set `write_index_N`, and `read_rows` and `read_length` where attention reads whole rows, before
    each forward pass: new keys and values are written to those positions of the pool. The padding
    of a pass is written to one position behind all rows.
    """

    def __init__(self, positions: int = 0, layers: int = 1) -> None:
        """With `positions` the pool has a fixed size and never moves in memory.

        It is then one tensor for all `layers`, so that copying a row is one kernel, not many, and
        rows change places by their slots alone.
        """
        super().__init__(layers=[])
        self.positions = positions
        self._tensors_per_block = 2 * layers if positions else 1
        self.active = 0
        """Number of rows of the running batch."""
        self.capacity = 0
        """Positions of each row."""
        self.tokens_SL: NDArray[np.int32] = np.empty((0, 0), np.int32)
        """The ids whose keys and values each row holds, from position 0."""
        self.length_S: NDArray[np.int64] = np.empty(0, np.int64)
        """Number of tokens each row holds."""
        self.slot_S: NDArray[np.int64] = np.empty(0, np.int64)
        """Where each row is in the pool, in units of `capacity`."""
        self.used_S: NDArray[np.int64] = np.empty(0, np.int64)
        """The pass in which each row was last active, to evict the oldest first."""
        self.read_rows: slice | Sequence[int] | None = None
        """Rows whose keys and values a layer gets; None gives it the whole pool."""
        self.write_index_N = torch.empty(0)
        """Positions of the pool that new keys and values are written to."""
        self.read_length = 0
        """Positions of each row that attention reads."""
        self._blocks: list[Tensor] = []
        """The memory: (X, P, H, D), keys or values of one or more layers."""
        self._pools: list[Tensor] = []
        """Keys and values of each layer in turn: (P, H, D), views of the blocks."""

    @property
    def rows(self) -> int:
        """Number of rows, active and idle."""
        return len(self.length_S)

    @property
    def padding_position(self) -> int:
        """The position of the pool that belongs to no row."""
        return self.positions or self.rows * self.capacity

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
        block_XPHD = like.new_zeros(
            self._tensors_per_block, self.padding_position + 1, heads, like.shape[-1]
        )
        self._blocks.append(block_XPHD)
        self._pools += block_XPHD.unbind()

    def _write(self, pool_PHD: Tensor, new_BHTD: Tensor) -> Tensor:
        pool_PHD.index_copy_(0, self.write_index_N, new_BHTD.transpose(1, 2).flatten(0, 1))
        if self.read_rows is None:
            return pool_PHD
        rows_SLHD = _view_by_row(pool_PHD, self.rows, self.capacity)
        return rows_SLHD[self.read_rows, : self.read_length].transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.read_length

    def resize(self, rows: int, capacity: int) -> None:
        """Change the number of rows and their capacity.

        Idle rows that were used longest ago are evicted first; where the capacity shrinks, longer
        rows keep the prefix that fits.
        """
        idle = sorted(range(self.active, self.rows), key=lambda row: -self.used_S[row])
        keep = [*range(self.active), *idle][:rows]
        columns = min(capacity, self.capacity)
        held = int(self.length_S[keep].clip(max=columns).max(initial=0))
        old_blocks, old_shape = self._blocks, (self.rows, self.capacity)
        tokens_SL = np.full((rows, capacity), NO_TOKEN, np.int32)
        tokens_SL[: len(keep), :columns] = self.tokens_SL[keep, :columns]
        self.tokens_SL = tokens_SL
        grown = (0, rows - len(keep))
        old_slots, self.slot_S = self.slot_S[keep], np.arange(rows)
        self.length_S = np.pad(self.length_S[keep].clip(max=columns), grown)
        self.used_S = np.pad(self.used_S[keep], grown)
        self.capacity = capacity
        if not self.positions:
            self._blocks, self._pools = [], []
            for block_XPHD in old_blocks:
                self._add_block(block_XPHD, heads=block_XPHD.shape[-2])
        for old_XPHD, new_XPHD in zip(old_blocks, self._blocks, strict=True):
            self._copy_rows(
                old_XPHD, old_shape, old_slots, new_XPHD, self.slot_S[: len(keep)], held
            )

    def _copy_rows(
        self,
        old_XPHD: Tensor,
        old_shape: tuple[int, int],
        sources: NDArray[np.int64],
        new_XPHD: Tensor,
        targets: NDArray[np.int64],
        columns: int,
    ) -> None:
        """Copy the first columns of some slots in one operation, since they may overlap."""
        if not columns or not len(sources):
            return
        old_XSLHD = _view_by_row(old_XPHD, *old_shape)
        new_XSLHD = _view_by_row(new_XPHD, self.rows, self.capacity)
        source_M, target_M = (torch.tensor(i, device=new_XPHD.device) for i in (sources, targets))
        size = len(sources) * columns * old_XSLHD.shape[-1] * old_XSLHD.shape[-2]
        layers = max(1, COPY_ELEMENTS // size)
        for first in range(0, len(old_XSLHD), layers):
            part = slice(first, first + layers)
            new_XSLHD[part, target_M, :columns] = old_XSLHD[part, source_M, :columns]

    def extend(self, rows: Sequence[int], new_ids: Sequence[Sequence[int]]) -> None:
        """Record the tokens that were appended to these rows."""
        for row, new in zip(rows, new_ids, strict=True):
            start = self.length_S[row]
            self.tokens_SL[row, start : start + len(new)] = new
            self.length_S[row] += len(new)

    def extend_active(self, token_B: NDArray[np.int64]) -> None:
        """Record one token that was appended to every active row."""
        rows = np.arange(self.active)
        self.tokens_SL[rows, self.length_S[: self.active]] = token_B
        self.length_S[: self.active] += 1

    def reorder(self, order_S: Sequence[int]) -> None:
        """Permute the first rows: row `i` becomes what row `order_S[i]` was."""
        order = np.asarray(order_S, np.int64)
        moved = np.flatnonzero(order != np.arange(len(order)))
        if len(moved):
            self._move(moved, order[moved])

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        if a != b:
            self._move(np.array([a, b]), np.array([b, a]))

    def _move(self, targets: NDArray[np.int64], sources: NDArray[np.int64]) -> None:
        """Make each target row what its source was; both are the same rows."""
        if self.positions:  # attention reads a row by its slot, so nothing has to be copied
            self.slot_S[targets] = self.slot_S[sources]
        else:  # attention reads neighboring rows
            columns, shape = int(self.length_S[sources].max()), (self.rows, self.capacity)
            for block_XPHD in self._blocks:
                self._copy_rows(block_XPHD, shape, sources, block_XPHD, targets, columns)
        for array in (self.tokens_SL, self.length_S, self.used_S):
            array[targets] = array[sources]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Make row `target` hold the first `length` positions of `source`, and nothing else."""
        if source != target:
            for block_XPHD in self._blocks:
                rows_XSLHD = _view_by_row(block_XPHD, self.rows, self.capacity)
                into, out_of = self.slot_S[[target, source]]
                rows_XSLHD[:, into, :length] = rows_XSLHD[:, out_of, :length]
            self.tokens_SL[target, :length] = self.tokens_SL[source, :length]
        self.tokens_SL[target, length:] = NO_TOKEN
        self.length_S[target] = length

    def find_longest_prefix(self, tokens: NDArray[np.int32]) -> tuple[int, int]:
        """Find (row, length) of the longest prefix of `tokens` that some row holds."""
        held = np.flatnonzero(self.length_S)
        return find_longest_prefix(self.tokens_SL[: held[-1] + 1 if len(held) else 0], tokens)

    def clear(self) -> None:
        """Drop all keys and values: the weights they were computed with changed."""
        rows = self.rows if self.positions else self.active
        self.tokens_SL = np.full((rows, self.capacity), NO_TOKEN, np.int32)
        self.length_S = np.zeros(rows, np.int64)
        self.slot_S, self.used_S = self.slot_S[:rows], self.used_S[:rows]
        # A masked column still takes part with weight zero, so a NaN must not stay in memory.
        if self.positions:
            for block_XPHD in self._blocks:
                block_XPHD.zero_()
        else:
            self._blocks, self._pools = [], []


def _view_by_row(pool: Tensor, rows: int, capacity: int) -> Tensor:
    """View one or more pools by row: (..., S, L, H, D)."""
    used = pool[..., : rows * capacity, :, :]
    return used.view(*pool.shape[:-3], rows, capacity, *pool.shape[-2:])


def find_longest_prefix(rows_SL: NDArray[np.int32], tokens: NDArray[np.int32]) -> tuple[int, int]:
    """Find (row, length) of the longest prefix of `tokens` that some row begins with."""
    n = min(len(tokens), rows_SL.shape[1])
    if not len(rows_SL) or not n:
        return 0, 0
    same_SN = rows_SL[:, :n] == tokens[:n]
    prefix_S = np.where(same_SN.all(axis=1), n, same_SN.argmin(axis=1))
    best = int(prefix_S.argmax())
    return best, int(prefix_S[best])


_ROW = np.dtype(
    [
        ("last", np.int64),  # the newest token, the input of the next step
        ("total", np.int64),  # tokens of prompt and generation
        ("end", np.int64),  # the total at which the request's limit is reached
        ("sampled", np.int64),  # tokens sampled
        ("seed", np.uint64),
        ("every", np.bool_),  # every token is given to the request at once
        ("stop", np.int64, MAX_STOP_IDS),
        ("sampling", np.float64, 3),  # temperature, top-p and top-k
        ("buffered", np.int64),  # entries in use of the two buffers
        ("tokens", np.int32, BUFFERED_TOKENS),
        ("logprobs", np.float32, BUFFERED_TOKENS),
    ]
)


class RunningBatch(Generic[R]):
    """The active requests, and their state in arrays so that most steps run no Python per row.

    At a thousand rows a step of the model takes four milliseconds, and so would a few microseconds
    of Python for each row. Sampled tokens are buffered until their request ends, or given to it at
    once where it needs every token.
    """

    def __init__(self) -> None:
        self.requests: list[R] = []
        self._table = np.zeros(0, _ROW)
        self._transform: SamplingTransform | None = None

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def last_B(self) -> NDArray[np.int64]:
        """The newest token of each row."""
        return self._rows["last"]

    @property
    def total_B(self) -> NDArray[np.int64]:
        """Tokens of prompt and generation of each row."""
        return self._rows["total"]

    @property
    def sampled_B(self) -> NDArray[np.int64]:
        """Number of tokens sampled for each row."""
        return self._rows["sampled"]

    @property
    def seed_B(self) -> NDArray[np.uint64]:
        """Random seed of each row."""
        return self._rows["seed"]

    @property
    def any_needs_every_token(self) -> bool:
        """Whether some row must be processed at every token."""
        return bool(self._rows["every"].any())

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(self.total_B.max(initial=0))

    def add(self, request: R) -> None:
        """Append a request as the last row."""
        if len(self.requests) == len(self._table):
            more = np.zeros(max(16, len(self._table)), _ROW)
            self._table = np.concatenate([self._table, more])
        row = self._table[len(self.requests)]
        self.requests.append(request)
        sampling = request.sampling
        ids = sampling.stop_ids
        row["last"], row["total"] = request.tokens[-1], len(request.tokens)
        row["sampled"] = len(request.logprobs)
        row["end"] = len(request.tokens) - len(request.logprobs) + request.limit
        row["seed"] = request.seed
        row["every"] = request.needs_every_token or len(ids) > MAX_STOP_IDS
        row["stop"] = NO_TOKEN
        row["stop"][: len(ids[:MAX_STOP_IDS])] = ids[:MAX_STOP_IDS]
        row["sampling"] = sampling.temperature, sampling.top_p, sampling.top_k
        row["buffered"] = 0
        self._transform = None

    def reorder(self, order: Sequence[int]) -> None:
        """Permute rows: row `i` becomes what row `order[i]` was; rows not in `order` leave."""
        self._table[: len(order)] = self._table[list(order)]
        self.requests = [self.requests[row] for row in order]
        self._transform = None

    def build_transform(self, device: torch.device) -> SamplingTransform:
        """Build the temperature, top-p and top-k of each row."""
        if self._transform is None:
            self._transform = SamplingTransform.from_settings(self._rows["sampling"], device)
        return self._transform

    def record(
        self, token_B: NDArray[np.int64], logprob_B: NDArray[np.float32]
    ) -> NDArray[np.int64]:
        """Buffer one token for each row; returns the rows to flush."""
        rows = self._rows
        at_B = np.arange(len(rows)), rows["buffered"]
        rows["tokens"][at_B] = token_B
        rows["logprobs"][at_B] = logprob_B
        rows["last"] = token_B
        for count in ("buffered", "total", "sampled"):
            rows[count] += 1
        due_B = rows["every"] | (rows["total"] >= rows["end"])
        due_B |= rows["buffered"] == BUFFERED_TOKENS
        due_B |= (rows["stop"] == token_B[:, None]).any(axis=1)
        return np.flatnonzero(due_B)

    def flush_row(self, row: int) -> SampledTokens:
        """Empty a row's buffer and return its tokens."""
        count = self._rows[row]["buffered"]
        tokens = self._rows["tokens"][row, :count].tolist()
        logprobs = self._rows["logprobs"][row, :count].tolist()
        self._rows["buffered"][row] = 0
        return SampledTokens(tokens, logprobs)

    @property
    def _rows(self) -> NDArray[np.void]:
        return self._table[: len(self.requests)]
