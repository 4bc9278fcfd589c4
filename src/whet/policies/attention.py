"""Attention over packed trees without a mask: each branch reads its own ancestors' keys.

A branch is a run of nodes in which each continues the one before. Its queries lie together; the
keys and values it sees, its ancestors' and its own, are gathered. What is left is causal attention
of many short sequences, which PyTorch's flash kernel does without padding or a mask: memory grows
with the rows' lengths, not with the square of the pack's.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, masking_utils
from transformers.integrations import sdpa_attention

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10: trees get a mask
    varlen_attn = None

try:
    from whet.policies import kernels
except ModuleNotFoundError:  # Triton comes only with a torch that has a GPU
    kernels = None

NAME = "whet"
"""Of this attention, for transformers."""

TOLD = (
    {"enable_gqa": True}
    if varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters
    else {}
)
"""Newer versions want to hear that keys may have fewer heads than queries."""

Kernel = Callable[[Tensor, Tensor, Tensor, "Branches", float | None], Tensor]


@dataclass(frozen=True, slots=True)
class Branches:
    """The branches of a tree, in the order of its nodes."""

    query_ends: Tensor
    """0, then the node after the last of each branch, int32."""
    key_ends: Tensor
    """0, then how many keys this branch and those before it see, int32."""
    keys: Tensor
    """The node of every key, branch by branch."""
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, runs: Sequence[tuple[int, NDArray[np.int64]]], device: torch.device) -> "Branches":
        """From the number of nodes each branch adds, and the nodes of the row it ends."""
        queries, keys = [n for n, _ in runs], [len(nodes) for _, nodes in runs]

        def ends(lengths: list[int]) -> Tensor:
            return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device)

        return cls(
            query_ends=ends(queries),
            key_ends=ends(keys),
            keys=torch.from_numpy(np.concatenate([nodes for _, nodes in runs])).to(device),
            # Powers of two: compiled code is for one value of each.
            most_queries=1 << (max(queries) - 1).bit_length(),
            most_keys=1 << (max(keys) - 1).bit_length(),
        )

    def gather(self, nodes_LHD: Tensor) -> Tensor:
        """Of every key what its node has."""
        if torch.compiler.is_compiling():
            return nodes_LHD[self.keys]
        return cast(Tensor, _Gather.apply(nodes_LHD, self.keys))


class _Gather(torch.autograd.Function):
    """Indexing whose gradient is added up in fp32, all at once.

    PyTorch's own sorts the index first, and adds one by one what many rows want of one node.
    """

    @staticmethod
    def forward(ctx: Any, nodes_LHD: Tensor, keys_M: Tensor) -> Tensor:
        # Any: torch gives the context of a function no useful type.
        ctx.save_for_backward(keys_M)
        ctx.nodes = len(nodes_LHD)
        return nodes_LHD[keys_M]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        [keys_M] = ctx.saved_tensors
        [grad_MHD] = grads
        sums_LW = _add_at(grad_MHD.flatten(1), keys_M, ctx.nodes)
        return sums_LW.to(grad_MHD.dtype).view(-1, *grad_MHD.shape[1:]), None


def _add_at(values_MW: Tensor, index_M: Tensor, rows: int) -> Tensor:
    if values_MW.is_cuda and kernels is not None:
        return kernels.add_at(values_MW, index_M, rows)
    sums_LW = values_MW.new_zeros(rows, values_MW.shape[1], dtype=torch.float32)
    return sums_LW.index_add_(0, index_M, values_MW.float())


def flash(
    query_LHD: Tensor, key_MHD: Tensor, value_MHD: Tensor, branches: Branches, scale: float | None
) -> Tensor:
    """Causal attention, aligned at the end of each branch. For half precision on a GPU."""
    assert varlen_attn is not None
    return cast(Callable[..., Tensor], varlen_attn)(
        query_LHD,
        key_MHD,
        value_MHD,
        branches.query_ends,
        branches.key_ends,
        branches.most_queries,
        branches.most_keys,
        scale=scale,
        window_size=(-1, 0),
        **TOLD,
    )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    branches: Branches | None = None,
    kernel: Kernel = flash,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: as `sdpa` does, unless the pass is of a tree.

    `others` is what transformers may add; Any, since it says no more about it.
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
    """Make the attention known to transformers. Idempotent."""
    AttentionInterface.register(NAME, attend)
    masking_utils.AttentionMaskInterface.register(NAME, masking_utils.sdpa_mask)


def runs_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel runs there; else trees need a mask."""
    if device.type != "cuda" or dtype != torch.bfloat16 or varlen_attn is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
