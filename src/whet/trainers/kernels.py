"""Scores of sampled tokens in one reading of their logits. Imported only where Triton is."""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# Triton is its own language inside Python, and comes with torch only where torch has a GPU.

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Logits that a program has at a time."""
LOWEST = -1e30
"""Below every logit, and a number: infinity minus itself is none."""


@triton.jit
def _score(
    logits, target, divisor, logp, entropy, normaliser, width,
    LOWEST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One token; each lane keeps sums of its own, put together in the end."""
    row = tl.program_id(0).to(tl.int64)
    divide = tl.load(divisor + row)
    highest = tl.full([TILE], LOWEST, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    weighted = tl.zeros([TILE], tl.float32)
    for begin in range(0, width, TILE):
        column = begin + tl.arange(0, TILE)
        inside = column < width
        x = tl.load(logits + row * width + column, mask=inside, other=LOWEST) / divide
        above = tl.maximum(highest, x)
        shrink = tl.exp(highest - above)
        share = tl.where(inside, tl.exp(x - above), 0.0)
        total = total * shrink + share
        weighted = weighted * shrink + share * x
        highest = above
    most = tl.max(highest, axis=0)
    shrink = tl.exp(highest - most)
    whole = tl.sum(total * shrink, axis=0)
    log_whole = most + tl.log(whole)
    chosen = tl.load(logits + row * width + tl.load(target + row)) / divide
    tl.store(logp + row, chosen - log_whole)
    tl.store(entropy + row, log_whole - tl.sum(weighted * shrink, axis=0) / whole)
    tl.store(normaliser + row, log_whole)


def score(logits_CV: Tensor, target_C: Tensor, divisor_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each target, entropy, and the logarithm of what exponentials sum up to."""
    logp_C, entropy_C, normaliser_C = (
        torch.empty(len(logits_CV), dtype=torch.float32, device=logits_CV.device) for _ in range(3)
    )
    _score[(len(logits_CV),)](
        logits_CV, target_C, divisor_C, logp_C, entropy_C, normaliser_C, logits_CV.shape[1],
        LOWEST=LOWEST, TILE=TILE, num_warps=8,
    )  # fmt: skip
    return logp_C, entropy_C, normaliser_C


@triton.jit
def _slope(logits, target, divisor, normaliser, times, width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    divide = tl.load(divisor + row)
    x = tl.load(logits + row * width + column, mask=inside, other=0.0) / divide
    p = tl.exp(x - tl.load(normaliser + row))
    hit = column == tl.load(target + row)
    slope = (tl.where(hit, 1.0, 0.0) - p) * (tl.load(times + row) / divide)
    tl.store(logits + row * width + column, slope, mask=inside)


def slope_into(
    logits_CV: Tensor, target_C: Tensor, divisor_C: Tensor, normaliser_C: Tensor, times_C: Tensor
) -> Tensor:
    """How the log-probabilities change with the logits, each times a number; over the logits."""
    rows, width = logits_CV.shape
    _slope[(rows, triton.cdiv(width, TILE))](
        logits_CV, target_C, divisor_C, normaliser_C, times_C, width, TILE=TILE, num_warps=8
    )
    return logits_CV
