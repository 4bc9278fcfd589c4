"""Attention over packed trees without a mask: each branch reads its own ancestors' keys.

A branch is a run of nodes in which each continues the one before. Its queries lie together; the
keys and values it sees, its ancestors' and its own, are gathered. What is left is causal attention
of many short sequences, which PyTorch's flash kernel does without padding or a mask: memory grows
with the rows' lengths, not with the square of the pack's.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, masking_utils
from transformers.integrations import sdpa_attention

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10: trees get a mask
    varlen_attn = None

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
    key_MHD, value_MHD = key_LHD[branches.keys], value_LHD[branches.keys]
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
