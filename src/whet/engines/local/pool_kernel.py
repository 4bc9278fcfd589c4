"""Triton kernel of `pool_attention`. Imported only where Triton is installed.

Every row reads its part of the pool up to its own length, so rows of any lengths form a batch
without padding, and one CUDA graph serves them all. A step of SmolLM2-135M on an H200 at batch 1024
takes 5.1 ms with it, 7.8 ms with PyTorch's attention and a mask.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# Triton is a language of its own inside Python, and comes with torch only for GPUs.

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_TILE_ROWS = 16
"""Rows of the smallest tile that matrix units support."""


@triton.jit
def _attend(
    query, keys, values, out, base, position,
    query_b, query_h, query_t, key_p, key_h, out_b, out_t, out_h,
    scale, tokens,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, TILE_D: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One row, one key-value head, one tile of queries: those of all heads of the group."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    index = tl.program_id(2) * TILE_M + tl.arange(0, TILE_M)
    token = index // GROUP
    mine = head * GROUP + index % GROUP
    live = token < tokens
    d = tl.arange(0, TILE_D)
    inside = d < WIDTH
    at = tl.load(position + row * tokens + token, mask=live, other=0)
    last = tl.max(at, axis=0)
    first = tl.load(base + row)
    q = tl.load(
        query + row * query_b + mine[:, None] * query_h + token[:, None] * query_t + d[None, :],
        mask=live[:, None] & inside[None, :],
        other=0.0,
    )
    highest = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    mixed = tl.zeros([TILE_M, TILE_D], tl.float32)
    for begin in range(0, last + 1, TILE_N):
        column = begin + tl.arange(0, TILE_N)
        held = column <= last
        where = (first + column).to(tl.int64)[:, None] * key_p + head * key_h + d[None, :]
        wanted = held[:, None] & inside[None, :]
        k = tl.load(keys + where, mask=wanted, other=0.0)
        v = tl.load(values + where, mask=wanted, other=0.0)
        if EXACT:
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        else:
            score = tl.dot(q, tl.trans(k)) * scale
        score = tl.where(column[None, :] <= at[:, None], score, float("-inf"))
        above = tl.maximum(highest, tl.max(score, axis=1))
        shrink = tl.exp(highest - above)
        share = tl.exp(score - above[:, None])
        total = total * shrink + tl.sum(share, axis=1)
        if EXACT:
            mixed = mixed * shrink[:, None] + tl.dot(share, v, input_precision="ieee")
        else:
            mixed = mixed * shrink[:, None] + tl.dot(share.to(v.dtype), v)
        highest = above
    tl.store(
        out + row * out_b + token[:, None] * out_t + mine[:, None] * out_h + d[None, :],
        (mixed / total[:, None]).to(out.dtype.element_ty),
        mask=live[:, None] & inside[None, :],
    )


def attend(
    query_BHTD: Tensor,
    keys_PHD: Tensor,
    values_PHD: Tensor,
    base_B: Tensor,
    position_BT: Tensor,
    scale: float,
) -> Tensor:
    """Attention of each token to its row's positions up to its own; returns (B, T, H, D).

    Position `p` of row `b` is at `base_B[b] + p` of the pool. Keys and values have the same layout;
    the last dimension of all tensors is contiguous.
    """
    rows, heads, tokens, width = query_BHTD.shape
    kv_heads = keys_PHD.shape[1]
    group = heads // kv_heads
    out_BTHD = torch.empty(
        (rows, tokens, heads, width), dtype=query_BHTD.dtype, device=query_BHTD.device
    )
    tile_m = min(64, max(MIN_TILE_ROWS, triton.next_power_of_2(tokens * group)))
    grid = (rows, kv_heads, triton.cdiv(tokens * group, tile_m))
    _attend[grid](
        query_BHTD, keys_PHD, values_PHD, out_BTHD, base_B, position_BT,
        query_BHTD.stride(0), query_BHTD.stride(1), query_BHTD.stride(2),
        keys_PHD.stride(0), keys_PHD.stride(1),
        out_BTHD.stride(0), out_BTHD.stride(1), out_BTHD.stride(2),
        scale, tokens,
        GROUP=group, WIDTH=width, TILE_D=triton.next_power_of_2(width),
        TILE_M=tile_m, TILE_N=64, EXACT=query_BHTD.dtype == torch.float32,
    )  # fmt: skip
    return out_BTHD
