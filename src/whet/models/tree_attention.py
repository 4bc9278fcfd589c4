"""Attention over packed prefix trees without a mask.

A branch is a run of nodes in which each continues the one before. Its queries are contiguous; the
keys and values it sees, its ancestors' and its own, are gathered. The rest is causal attention of
many short sequences, which PyTorch's variable-length flash kernel computes without padding or a
mask: memory grows with the rows' lengths, not with the square of the pack's.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel, masking_utils
from transformers.integrations import sdpa_attention

from whet.models.rounding import DISTURBED_RUNS, simulate_rounding_errors

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10: trees use a mask
    varlen_attn = None

try:
    from whet.models import fused_kernels as kernels
except ModuleNotFoundError:  # Triton comes with torch only for GPUs
    kernels = None

NAME = "whet"
"""Name under which transformers knows this attention."""

VARLEN_KWARGS = (
    {"enable_gqa": True}
    if varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters
    else {}
)
"""Newer versions of torch need a flag for keys that have fewer heads than queries."""

Kernel = Callable[[Tensor, Tensor, Tensor, "Branches", float | None], Tensor]


@dataclass(frozen=True, slots=True)
class Branches:
    """The branches of a prefix tree, in the order of its nodes."""

    query_ends: Tensor
    """Cumulative number of queries: 0, then one past the last node of each branch, int32."""
    key_ends: Tensor
    """Cumulative number of keys that the branches see, int32."""
    keys: Tensor
    """The node of every key, branch by branch."""
    max_queries: int
    max_keys: int

    @classmethod
    def from_runs(
        cls, runs: Sequence[tuple[int, NDArray[np.int64]]], device: torch.device
    ) -> "Branches":
        """Build from the number of nodes each branch adds, and the nodes of the row it ends."""
        queries, keys = [n for n, _ in runs], [len(nodes) for _, nodes in runs]

        def compute_ends(lengths: list[int]) -> Tensor:
            return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device)

        return cls(
            query_ends=compute_ends(queries),
            key_ends=compute_ends(keys),
            keys=torch.from_numpy(np.concatenate([nodes for _, nodes in runs])).to(device),
            # Rounded up to powers of two: the kernel is compiled once per value.
            max_queries=1 << (max(queries) - 1).bit_length(),
            max_keys=1 << (max(keys) - 1).bit_length(),
        )

    def gather(self, nodes_LHD: Tensor) -> Tensor:
        """The row of each key's node, with a fast backward pass."""
        if torch.compiler.is_compiling():
            return nodes_LHD[self.keys]
        return cast(Tensor, _Gather.apply(nodes_LHD, self.keys))


class _Gather(torch.autograd.Function):
    """Indexing whose gradient is a scatter-add in fp32.

    PyTorch's own backward sorts the index and adds the gradients of a shared node one by one.
    """

    @staticmethod
    def forward(ctx: Any, nodes_LHD: Tensor, keys_M: Tensor) -> Tensor:
        # Any: torch has no useful type for the context of a function.
        ctx.save_for_backward(keys_M)
        ctx.nodes = len(nodes_LHD)
        return nodes_LHD[keys_M]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        [keys_M] = ctx.saved_tensors
        [grad_MHD] = grads
        sums_LW = _scatter_add(grad_MHD.flatten(1), keys_M, ctx.nodes)
        return sums_LW.to(grad_MHD.dtype).view(-1, *grad_MHD.shape[1:]), None


def _scatter_add(values_MW: Tensor, index_M: Tensor, rows: int) -> Tensor:
    if values_MW.is_cuda and kernels is not None:
        return kernels.scatter_add(values_MW, index_M, rows)
    sums_LW = values_MW.new_zeros(rows, values_MW.shape[1], dtype=torch.float32)
    return sums_LW.index_add_(0, index_M, values_MW.float())


def attend_flash(
    query_LHD: Tensor, key_MHD: Tensor, value_MHD: Tensor, branches: Branches, scale: float | None
) -> Tensor:
    """Causal attention aligned at the end of each branch, for half precision on a GPU."""
    assert varlen_attn is not None
    return cast(Callable[..., Tensor], varlen_attn)(
        query_LHD,
        key_MHD,
        value_MHD,
        branches.query_ends,
        branches.key_ends,
        branches.max_queries,
        branches.max_keys,
        scale=scale,
        window_size=(-1, 0),
        **VARLEN_KWARGS,
    )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    branches: Branches | None = None,
    kernel: Kernel = attend_flash,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function that transformers calls in every layer: `sdpa`, except for trees.

    `others` are further arguments of transformers, which has no type for them; hence Any.
    """
    if branches is None:
        return sdpa_attention.sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
    query_LHD, key_LHD, value_LHD = (x[0].transpose(0, 1) for x in (query, key, value))
    key_MHD, value_MHD = branches.gather(key_LHD), branches.gather(value_LHD)
    out_LHD = kernel(query_LHD, key_MHD, value_MHD, branches, scaling)
    return out_LHD[None], None


def register() -> None:
    """Register the attention with transformers. Idempotent."""
    AttentionInterface.register(NAME, attend)
    masking_utils.AttentionMaskInterface.register(NAME, masking_utils.sdpa_mask)


def can_run_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the flash kernel runs on this device in this precision; else trees need a mask."""
    if device.type != "cuda" or dtype != torch.bfloat16 or varlen_attn is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def list_probe_ids(count: int, vocabulary: int) -> NDArray[np.int64]:
    """Token ids of a tiny row, of which few are special ones."""
    return (7 * np.arange(count) + 3) % min(vocabulary, 256)


class RowProbe:
    """Comparison of a model's passes over tiny rows: packed, alone, and in a longer context.

    A gap is the largest difference of a token's hidden state, relative to its norm. The reference
    is the model's own attention, "eager".
    """

    PREFIX, BRANCH = 6, 5
    """Tokens that both rows share, and tokens that each has of its own."""

    def __init__(self, model: PreTrainedModel, body: nn.Module, vocabulary: int) -> None:
        self._body, self._device = body, model.device
        self._flash = can_run_flash(model.device, model.dtype)
        size = self.PREFIX + 2 * self.BRANCH
        self._ids_L = torch.from_numpy(list_probe_ids(size, vocabulary)).to(model.device)
        shared, nodes = np.arange(self.PREFIX), np.arange(self.PREFIX, size)
        self._rows = [np.concatenate([shared, own]) for own in np.split(nodes, 2)]
        model.set_attn_implementation("eager")
        self._plain = [self._run(self._ids_L[row]) for row in self._rows]
        model.set_attn_implementation(NAME)

    def measure_tree_gap(self) -> float:
        """Gap of two rows in one tree to the rows alone."""
        node_L = torch.arange(len(self._ids_L), device=self._device)
        in_second_L = node_L >= self.PREFIX + self.BRANCH
        in_first_L = (node_L >= self.PREFIX) & ~in_second_L
        depth_L = torch.where(in_second_L, node_L - self.BRANCH, node_L)
        # Queries (dim 0) see the keys before them, but the second branch does not see the first.
        mask_LL = (node_L[None, :] <= node_L[:, None]) & ~(
            in_second_L[:, None] & in_first_L[None, :]
        )
        settings: dict[str, object] = {"attention_mask": mask_LL[None, None]}
        if self._flash:
            runs = [(len(self._rows[0]), self._rows[0]), (self.BRANCH, self._rows[1])]
            settings = {
                "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self._device),
                "branches": Branches.from_runs(runs, self._device),
            }
        try:
            hidden_LD = self._run(self._ids_L, depth_L, **settings)
        except (ValueError, RuntimeError):  # layers that take no such mask
            return math.inf
        own = slice(self.PREFIX, None)
        return max(
            _measure_gap(hidden_LD[torch.from_numpy(row).to(self._device)][own], plain_TD[own])
            for row, plain_TD in zip(self._rows, self._plain, strict=True)
        )

    def measure_row_gap(self) -> float:
        """Gap of a row with this module's attention to one with the model's own."""
        try:
            return _measure_gap(self._run(self._ids_L[self._rows[0]]), self._plain[0])
        except ValueError:  # sdpa refuses what it does not compute
            return math.inf

    def measure_length_gap(self, length: int) -> float:
        """Gap between a row whose last token is at the end of a context and the row alone."""
        row = self._rows[0]
        position_T = torch.arange(len(row), device=self._device)
        position_T[-1] = length - 1
        hidden_TD = self._run(self._ids_L[row], position_T)
        return _measure_gap(hidden_TD[:-1], self._run(self._ids_L[row])[:-1])

    def measure_rounding_gap(self) -> float:
        """Largest of some gaps of a row to itself with rounding errors."""
        with simulate_rounding_errors(self._body):
            runs = [self._run(self._ids_L[self._rows[0]]) for _ in range(DISTURBED_RUNS)]
        return max(_measure_gap(run_TD, self._plain[0]) for run_TD in runs)

    @torch.inference_mode()
    def _run(self, ids_T: Tensor, position_T: Tensor | None = None, **settings: object) -> Tensor:
        if position_T is not None:
            settings["position_ids"] = position_T[None]
        output = self._body(input_ids=ids_T[None], use_cache=False, **settings)
        return cast(Tensor, output.last_hidden_state)[0]


def _measure_gap(found_TD: Tensor, expected_TD: Tensor) -> float:
    norms = cast(Callable[..., Tensor], torch.linalg.vector_norm)
    difference_T = norms((found_TD - expected_TD).float(), dim=-1)
    # The state of a padding token may be 0, and 0 / 0 is no gap.
    norm_T = norms(expected_TD.float(), dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return (difference_T / norm_T).max().item()
