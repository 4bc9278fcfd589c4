"""Triton kernels that replace many small ones: RMS norm, rotary embedding, fp32 scatter-add.

`layers` says what they buy. Imported only where Triton is installed.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# Triton is a language of its own inside Python, and comes with torch only for GPUs.

import torch
import triton
import triton.language as tl
from torch import Tensor

PARTIAL_SUMS = 1024
"""Programs that sum a weight's gradient over rows; their partial sums are added at the end."""
SCATTER_TILE = 1024
"""Numbers that one program of the scatter-add handles."""


@triton.jit
def _rms_norm(hidden, weight, out, width, epsilon, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, TILE)
    inside = d < width
    x = tl.load(hidden + row * width + d, mask=inside, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / width + epsilon)
    # As transformers: round before multiplying by the weight, and once more after.
    x = x.to(out.dtype.element_ty).to(tl.float32)
    x = x * tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + d, x.to(out.dtype.element_ty), mask=inside)


def rms_norm(hidden: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """RMS norm over the last dimension, times the weight."""
    hidden = hidden.contiguous()
    out = torch.empty_like(hidden)
    width = hidden.shape[-1]
    _rms_norm[(hidden.numel() // width,)](
        hidden, weight_D, out, width, epsilon, TILE=triton.next_power_of_2(width)
    )
    return out


@triton.jit
def _rms_norm_grad(
    grad, hidden, weight, hidden_grad, weight_grad, rows, width, epsilon, TILE: tl.constexpr
):
    share = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, TILE)
    inside = d < width
    w = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for row in range(share, rows, tl.num_programs(0)):
        at = row * width + d
        x = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        root = tl.rsqrt(tl.sum(x * x, axis=0) / width + epsilon)
        unit = x * root
        total += g * unit.to(hidden.dtype.element_ty).to(tl.float32)
        g *= w
        out = root * (g - unit * (tl.sum(g * unit, axis=0) / width))
        tl.store(hidden_grad + at, out.to(hidden_grad.dtype.element_ty), mask=inside)
    tl.store(weight_grad + share * width + d, total, mask=inside)


def rms_norm_grad(
    grad: Tensor, hidden: Tensor, weight_D: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Gradients of hidden states and weight from that of `rms_norm`'s output."""
    grad, hidden = grad.contiguous(), hidden.contiguous()
    width = hidden.shape[-1]
    rows = hidden.numel() // width
    shares = min(rows, PARTIAL_SUMS)
    hidden_grad = torch.empty_like(hidden)
    weight_grad_SD = torch.empty(shares, width, dtype=torch.float32, device=hidden.device)
    _rms_norm_grad[(shares,)](
        grad, hidden, weight_D, hidden_grad, weight_grad_SD, rows, width, epsilon,
        TILE=triton.next_power_of_2(width),
    )  # fmt: skip
    return hidden_grad, weight_grad_SD.sum(dim=0).to(weight_D.dtype)


@triton.jit
def _scatter_add(values, index, sums, size, width, TILE: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = offset < size
    value = tl.load(values + offset, mask=inside, other=0.0).to(tl.float32)
    target = tl.load(index + offset // width, mask=inside, other=0)
    tl.atomic_add(sums + target * width + offset % width, value, mask=inside, sem="relaxed")


def scatter_add(values_MW: Tensor, index_M: Tensor, rows: int) -> Tensor:
    """Scatter-add in fp32: row `i` of the result is the sum of the values whose index is `i`."""
    values_MW = values_MW.contiguous()
    size, width = values_MW.numel(), values_MW.shape[1]
    sums_LW = torch.zeros(rows, width, dtype=torch.float32, device=values_MW.device)
    _scatter_add[(triton.cdiv(size, SCATTER_TILE),)](
        values_MW, index_M, sums_LW, size, width, TILE=SCATTER_TILE
    )
    return sums_LW


@triton.jit
def _rotate_heads(
    source, target, cos, sin, token, angle, HEADS: tl.constexpr, TILE_H: tl.constexpr,
    HALF: tl.constexpr, TILE_D: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of one token: pairs of numbers half a vector apart."""
    head = tl.arange(0, TILE_H)[:, None]
    d = tl.arange(0, TILE_D)[None, :]
    inside = (head < HEADS) & (d < HALF)
    first = token * (HEADS * 2 * HALF) + head * (2 * HALF) + d
    near = angle * (2 * HALF) + d
    cos1 = tl.load(cos + near, mask=d < HALF, other=0.0).to(tl.float32)
    cos2 = tl.load(cos + near + HALF, mask=d < HALF, other=0.0).to(tl.float32)
    sin1 = tl.load(sin + near, mask=d < HALF, other=0.0).to(tl.float32)
    sin2 = tl.load(sin + near + HALF, mask=d < HALF, other=0.0).to(tl.float32)
    x1 = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(source + first + HALF, mask=inside, other=0.0).to(tl.float32)
    number = target.dtype.element_ty
    if BACKWARD:
        out1 = x1 * cos1 + x2 * sin2
        out2 = x2 * cos2 - x1 * sin1
    else:  # as transformers, round each product
        out1 = (x1 * cos1).to(number).to(tl.float32) - (x2 * sin1).to(number).to(tl.float32)
        out2 = (x2 * cos2).to(number).to(tl.float32) + (x1 * sin2).to(number).to(tl.float32)
    tl.store(target + first, out1.to(number), mask=inside)
    tl.store(target + first + HALF, out2.to(number), mask=inside)


@triton.jit
def _rotate(
    queries, keys, out_queries, out_keys, cos, sin, angles,
    HEADS: tl.constexpr, TILE_H: tl.constexpr, KEY_HEADS: tl.constexpr, TILE_K: tl.constexpr,
    HALF: tl.constexpr, TILE_D: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    angle = token % angles
    _rotate_heads(
        queries, out_queries, cos, sin, token, angle, HEADS, TILE_H, HALF, TILE_D, BACKWARD
    )
    _rotate_heads(keys, out_keys, cos, sin, token, angle, KEY_HEADS, TILE_K, HALF, TILE_D, BACKWARD)


def rotate(
    query_BHTD: Tensor, key_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, *, backward: bool
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions; with `backward`, their gradients.

    Memory layout is (B, T, H, D), of the results too. `cos` and `sin` may have one row for all.
    """
    query_BTHD, key_BTHD = (x.transpose(1, 2).contiguous() for x in (query_BHTD, key_BHTD))
    out_BTHD, out_key_BTHD = torch.empty_like(query_BTHD), torch.empty_like(key_BTHD)
    rows, tokens, heads, width = query_BTHD.shape
    key_heads, half = key_BTHD.shape[2], width // 2
    _rotate[(rows * tokens,)](
        query_BTHD, key_BTHD, out_BTHD, out_key_BTHD, cos_BTD.contiguous(), sin_BTD.contiguous(),
        len(cos_BTD) * tokens,
        HEADS=heads, TILE_H=triton.next_power_of_2(heads),
        KEY_HEADS=key_heads, TILE_K=triton.next_power_of_2(key_heads),
        HALF=half, TILE_D=triton.next_power_of_2(half), BACKWARD=backward,
    )  # fmt: skip
    return out_BTHD.transpose(1, 2), out_key_BTHD.transpose(1, 2)
