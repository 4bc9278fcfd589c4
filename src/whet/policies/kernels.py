"""What a GPU does in one kernel where PyTorch would launch many. Imported only where Triton is."""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# Triton is its own language inside Python, and comes with torch only where torch has a GPU.

import torch
import triton
import triton.language as tl
from torch import Tensor

SHARES = 1024
"""Programs among which a gradient of all rows is summed; their sums are added up in the end."""
AT_ONCE = 1024
"""Numbers that a program adds."""


@triton.jit
def _rms_norm(hidden, weight, out, width, epsilon, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, TILE)
    inside = d < width
    x = tl.load(hidden + row * width + d, mask=inside, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / width + epsilon)
    # transformers rounds before it multiplies by the weight, and once more after.
    x = x.to(out.dtype.element_ty).to(tl.float32)
    x = x * tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + d, x.to(out.dtype.element_ty), mask=inside)


def rms_norm(hidden: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """Each vector over the root of its mean square, times the weight."""
    hidden = hidden.contiguous()
    out = torch.empty_like(hidden)
    width = hidden.shape[-1]
    _rms_norm[(hidden.numel() // width,)](
        hidden, weight_D, out, width, epsilon, TILE=triton.next_power_of_2(width)
    )
    return out


@triton.jit
def _rms_norm_slope(
    grad, hidden, weight, of_hidden, of_weight, rows, width, epsilon, TILE: tl.constexpr
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
        slope = root * (g - unit * (tl.sum(g * unit, axis=0) / width))
        tl.store(of_hidden + at, slope.to(of_hidden.dtype.element_ty), mask=inside)
    tl.store(of_weight + share * width + d, total, mask=inside)


def rms_norm_slope(
    grad: Tensor, hidden: Tensor, weight_D: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The gradients of hidden states and weight, given that of `rms_norm`."""
    grad, hidden = grad.contiguous(), hidden.contiguous()
    width = hidden.shape[-1]
    rows = hidden.numel() // width
    shares = min(rows, SHARES)
    of_hidden = torch.empty_like(hidden)
    of_weight_SD = torch.empty(shares, width, dtype=torch.float32, device=hidden.device)
    _rms_norm_slope[(shares,)](
        grad, hidden, weight_D, of_hidden, of_weight_SD, rows, width, epsilon,
        TILE=triton.next_power_of_2(width),
    )  # fmt: skip
    return of_hidden, of_weight_SD.sum(dim=0).to(weight_D.dtype)


@triton.jit
def _add_at(values, index, sums, size, width, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < size
    value = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
    target = tl.load(index + place // width, mask=inside, other=0)
    tl.atomic_add(sums + target * width + place % width, value, mask=inside, sem="relaxed")


def add_at(values_MW: Tensor, index_M: Tensor, rows: int) -> Tensor:
    """Row `i` is the sum, in fp32, of the values whose index is `i`."""
    values_MW = values_MW.contiguous()
    size, width = values_MW.numel(), values_MW.shape[1]
    sums_LW = torch.zeros(rows, width, dtype=torch.float32, device=values_MW.device)
    _add_at[(triton.cdiv(size, AT_ONCE),)](values_MW, index_M, sums_LW, size, width, TILE=AT_ONCE)
    return sums_LW


@triton.jit
def _turn_heads(
    source, target, cos, sin, token, angle, HEADS: tl.constexpr, TILE_H: tl.constexpr,
    HALF: tl.constexpr, TILE_D: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """All heads of one token: pairs of numbers half a vector apart are turned."""
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
    if BACK:
        out1 = x1 * cos1 + x2 * sin2
        out2 = x2 * cos2 - x1 * sin1
    else:  # transformers rounds each product
        out1 = (x1 * cos1).to(number).to(tl.float32) - (x2 * sin1).to(number).to(tl.float32)
        out2 = (x2 * cos2).to(number).to(tl.float32) + (x1 * sin2).to(number).to(tl.float32)
    tl.store(target + first, out1.to(number), mask=inside)
    tl.store(target + first + HALF, out2.to(number), mask=inside)


@triton.jit
def _turn(
    queries, keys, out_queries, out_keys, cos, sin, angles,
    HEADS: tl.constexpr, TILE_H: tl.constexpr, KEY_HEADS: tl.constexpr, TILE_K: tl.constexpr,
    HALF: tl.constexpr, TILE_D: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    angle = token % angles
    _turn_heads(queries, out_queries, cos, sin, token, angle, HEADS, TILE_H, HALF, TILE_D, BACK)
    _turn_heads(keys, out_keys, cos, sin, token, angle, KEY_HEADS, TILE_K, HALF, TILE_D, BACK)


def turn(
    query_BHTD: Tensor, key_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, *, back: bool
) -> tuple[Tensor, Tensor]:
    """Queries and keys turned by the angles of their positions; `back`, gradients turned back.

    Heads of a token lie together, in what comes out too. There may be one row of angles for all.
    """
    query_BTHD, key_BTHD = (x.transpose(1, 2).contiguous() for x in (query_BHTD, key_BHTD))
    out_BTHD, out_key_BTHD = torch.empty_like(query_BTHD), torch.empty_like(key_BTHD)
    rows, tokens, heads, width = query_BTHD.shape
    key_heads, half = key_BTHD.shape[2], width // 2
    _turn[(rows * tokens,)](
        query_BTHD, key_BTHD, out_BTHD, out_key_BTHD, cos_BTD.contiguous(), sin_BTD.contiguous(),
        len(cos_BTD) * tokens,
        HEADS=heads, TILE_H=triton.next_power_of_2(heads),
        KEY_HEADS=key_heads, TILE_K=triton.next_power_of_2(key_heads),
        HALF=half, TILE_D=triton.next_power_of_2(half), BACK=back,
    )  # fmt: skip
    return out_BTHD.transpose(1, 2), out_key_BTHD.transpose(1, 2)
