"""Attention over the key-value pool, as a Triton kernel. Imported only where there is a GPU.

Every row reads its own part of the pool up to its own length, so rows of any lengths make a batch
without padding, and one CUDA graph serves them all.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# Triton is its own language inside Python, and comes with torch only where torch has a GPU.

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST_ROWS = 16
"""Of a tile that the matrix units take."""


@triton.jit
def _attend(
    query, keys, values, out, base, position,
    query_b, query_h, query_t, key_p, key_h, out_b, out_t, out_h,
    scale, tokens,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, TILE_D: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One row, one key-value head, one tile of its queries: the group's heads are queries too."""
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
    """Attention of each token to the positions of its row up to its own; (B, T, H, D).

    Row `b` holds its position `p` at `base_B[b] + p` of the pool. Keys and values have the same
    layout; the last dimension of all is contiguous.
    """
    rows, heads, tokens, width = query_BHTD.shape
    kv_heads = keys_PHD.shape[1]
    group = heads // kv_heads
    out_BTHD = torch.empty(
        (rows, tokens, heads, width), dtype=query_BHTD.dtype, device=query_BHTD.device
    )
    tile_m = min(64, max(LEAST_ROWS, triton.next_power_of_2(tokens * group)))
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
