"""Attention over the KV pool: each row's keys by position and length, without padding or a mask.

transformers calls it in every layer of a clone of the policy's model: other modules around the same
parameters. The kernel lets one CUDA graph serve rows of any lengths; see `pool_kernel`.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from whet.errors import EngineError
from whet.models.huggingface import clone_modules
from whet.models.layers import fuse_norms, fuse_rotary

try:
    from whet.engines.local import pool_kernel as kernel
except ModuleNotFoundError:  # Triton comes with torch only for GPUs
    kernel = None

NAME = "whet_pool"
"""Name under which transformers knows this attention."""

UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sliding_window")
"""Arguments of attention variants that are not implemented."""


class PoolRows(NamedTuple):
    """The rows of a pass in the KV pool."""

    base_B: Tensor
    """Position of the pool at which each row begins."""
    position_BT: Tensor
    """Position of each token in its row; it attends to positions up to its own."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    pool_rows: PoolRows,
    scaling: float | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attention function for transformers; keys and values are the whole pool, (P, H, D)."""
    for name in UNSUPPORTED:
        if others.get(name) is not None:
            raise EngineError(f"attention with {name} is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.is_cuda:
        assert kernel is not None
        return kernel.attend(
            query, key, value, pool_rows.base_B, pool_rows.position_BT, scale
        ), None
    return _attend_plain(query, key, value, pool_rows, scale), None


def has_kernel() -> bool:
    """Whether the Triton kernel is available."""
    return kernel is not None


def clone_for_pool(model: PreTrainedModel) -> PreTrainedModel:
    """Clone a model's modules, with this attention and fused layers, around its parameters."""
    AttentionInterface.register(NAME, attend)
    copy = clone_modules(model)
    # The public setter refuses names that are not of transformers.
    copy.config._attn_implementation = NAME  # pyright: ignore[reportPrivateUsage]
    fuse_norms(copy)
    fuse_rotary(copy)
    return copy


def _attend_plain(
    query_BHTD: Tensor, keys_PHD: Tensor, values_PHD: Tensor, pool_rows: PoolRows, scale: float
) -> Tensor:
    """The same in plain PyTorch, for tests on a CPU."""
    column_L = torch.arange(int(pool_rows.position_BT.max()) + 1)
    index_BL = (pool_rows.base_B[:, None] + column_L).clamp(max=len(keys_PHD) - 1)
    group = query_BHTD.shape[1] // keys_PHD.shape[1]
    key_BHLD, value_BHLD = (
        pool_PHD[index_BL].transpose(1, 2).repeat_interleave(group, dim=1)
        for pool_PHD in (keys_PHD, values_PHD)
    )
    mask_B1TL = column_L <= pool_rows.position_BT[:, None, :, None]
    out_BHTD = nn.functional.scaled_dot_product_attention(
        query_BHTD, key_BHLD, value_BHLD, attn_mask=mask_B1TL, scale=scale
    )
    return out_BHTD.transpose(1, 2)
