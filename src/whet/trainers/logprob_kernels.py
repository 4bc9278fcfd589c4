"""Triton kernels of `logprobs`: log-probability and entropy in one pass over the logits.

They save the softmax over the vocabulary in memory, the largest tensor of training besides the
logits. Imported only where Triton is installed.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# Triton is a language of its own inside Python, and comes with torch only for GPUs.

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Logits a program loads at a time."""
LOWEST = -1e30
"""Below every logit, but finite: -inf - -inf would be NaN."""


@triton.jit
def _score(
    logits, target, divisor, logp, entropy, log_sum, width,
    LOWEST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Score one token; each column of the tile keeps a running sum, reduced at the end."""
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
    tl.store(log_sum + row, log_whole)


def score(logits_CV: Tensor, target_C: Tensor, divisor_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probability of each target, the entropy, and the log-sum-exp of the logits."""
    logp_C, entropy_C, log_sum_C = (
        torch.empty(len(logits_CV), dtype=torch.float32, device=logits_CV.device) for _ in range(3)
    )
    _score[(len(logits_CV),)](
        logits_CV, target_C, divisor_C, logp_C, entropy_C, log_sum_C, logits_CV.shape[1],
        LOWEST=LOWEST, TILE=TILE, num_warps=8,
    )  # fmt: skip
    return logp_C, entropy_C, log_sum_C


@triton.jit
def _logp_grad(logits, target, divisor, log_sum, upstream, width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    divide = tl.load(divisor + row)
    x = tl.load(logits + row * width + column, mask=inside, other=0.0) / divide
    p = tl.exp(x - tl.load(log_sum + row))
    hit = column == tl.load(target + row)
    grad = (tl.where(hit, 1.0, 0.0) - p) * (tl.load(upstream + row) / divide)
    tl.store(logits + row * width + column, grad, mask=inside)


def logp_grad_(
    logits_CV: Tensor, target_C: Tensor, divisor_C: Tensor, log_sum_C: Tensor, grad_C: Tensor
) -> Tensor:
    """Gradient of the log-probabilities times the incoming one, written over the logits."""
    rows, width = logits_CV.shape
    _logp_grad[(rows, triton.cdiv(width, TILE))](
        logits_CV, target_C, divisor_C, log_sum_C, grad_C, width, TILE=TILE, num_warps=8
    )
    return logits_CV
