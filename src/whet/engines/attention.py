"""Attention that finds each row's keys in the pool by place and length, without a mask.

transformers calls it in every layer of a twin of the policy's model: other modules with another
attention, around the very same weights.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from whet.errors import EngineError
from whet.policies import local
from whet.policies.norms import fuse_norms
from whet.policies.rotary import fuse_rotary

try:
    from whet.engines import kernel
except ModuleNotFoundError:  # Triton comes only with a torch that has a GPU
    kernel = None

NAME = "whet_slots"
"""Of this attention, for transformers."""

UNKNOWN = ("softcap", "s_aux", "position_bias", "sliding_window")
"""What some models' attention does besides."""


class Slots(NamedTuple):
    """Where the rows of a pass are."""

    base_B: Tensor
    """Where in the pool each row begins."""
    position_BT: Tensor
    """Of each token in its row; it attends to those up to its own."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    slots: Slots,
    scaling: float | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """What transformers calls; keys and values are the pool's, (P, H, D)."""
    for name in UNKNOWN:
        if others.get(name) is not None:
            raise EngineError(f"attention with {name} is not known here")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.is_cuda:
        assert kernel is not None
        return kernel.attend(query, key, value, slots.base_B, slots.position_BT, scale), None
    return _attend_slowly(query, key, value, slots, scale), None


def has_kernel() -> bool:
    """Whether a GPU here can be used to the full."""
    return kernel is not None


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """The model with this attention: the same parameters in other modules."""
    AttentionInterface.register(NAME, attend)
    copy = local.twin(model)
    # The public way refuses names it does not know.
    copy.config._attn_implementation = NAME  # pyright: ignore[reportPrivateUsage]
    fuse_norms(copy)
    fuse_rotary(copy)
    return copy


def _attend_slowly(
    query_BHTD: Tensor, keys_PHD: Tensor, values_PHD: Tensor, slots: Slots, scale: float
) -> Tensor:
    """The same without the kernel, where there is no GPU."""
    seen_L = torch.arange(int(slots.position_BT.max()) + 1)
    place_BL = (slots.base_B[:, None] + seen_L).clamp(max=len(keys_PHD) - 1)
    group = query_BHTD.shape[1] // keys_PHD.shape[1]
    key_BHLD, value_BHLD = (
        pool_PHD[place_BL].transpose(1, 2).repeat_interleave(group, dim=1)
        for pool_PHD in (keys_PHD, values_PHD)
    )
    mask_B1TL = seen_L <= slots.position_BT[:, None, :, None]
    out_BHTD = nn.functional.scaled_dot_product_attention(
        query_BHTD, key_BHLD, value_BHLD, attn_mask=mask_B1TL, scale=scale
    )
    return out_BHTD.transpose(1, 2)
