"""Log-probabilities of sampled tokens without the logits of all of them at once.

Logits are the largest tensor of training: tokens times vocabulary. Here they exist for one chunk of
tokens at a time and are forgotten. A token's score depends on its own hidden state alone, so one
vector, its slope, is all the backward pass needs while the head is frozen; where the head is
trained, the logits of each chunk are computed once more.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from whet.policies.distribution import Shaping, log_probs
from whet.policies.head import Head

try:
    from whet.trainers import kernels
except ModuleNotFoundError:  # Triton comes only with a torch that has a GPU
    kernels = None

CHUNK = 2**26
"""Logits that exist at once: 256 MB, a few times over."""


class Scores(NamedTuple):
    """What the model says of sampled tokens."""

    logp_N: Tensor
    """In fp32, of the distribution they were sampled from."""
    entropy_N: Tensor
    """Of that distribution."""


def score(
    hidden_ND: Tensor,
    head: Head,
    target_N: Tensor,
    shaping: Shaping,
    *,
    entropy_slope: bool = False,
    chunk: int = CHUNK,
) -> Scores:
    """Score the token that each hidden state predicts.

    The entropy has a gradient only if `entropy_slope`.
    """
    job = _Job(head, target_N, shaping, entropy_slope, max(1, chunk // head.vocabulary))
    return Scores(*cast(tuple[Tensor, Tensor], _Score.apply(job, hidden_ND, *head.trained)))


class _Job(NamedTuple):
    """What is scored, but for the hidden states."""

    head: Head
    target_N: Tensor
    shaping: Shaping
    entropy_slope: bool
    chunk: int

    def parts(self) -> Iterator[slice]:
        for start in range(0, len(self.target_N), self.chunk):
            yield slice(start, start + self.chunk)


class _Chunk:
    """The distributions of some tokens; large, and gone soon."""

    def __init__(self, job: _Job, part: slice, logits_CV: Tensor) -> None:
        self._shaping = job.shaping.part(part)
        self._target_C1 = job.target_N[part, None]
        logp_CV = log_probs(logits_CV, self._shaping, self._target_C1[:, 0])
        self.logp_C = logp_CV.gather(1, self._target_C1)[:, 0]
        self._p_CV = logp_CV.exp()
        if self._shaping.truncates:  # what was cut off is nothing times minus infinity
            logp_CV = logp_CV.masked_fill(logp_CV == -torch.inf, 0.0)
        self._logp_CV = logp_CV

    def entropy(self) -> Tensor:
        return -cast(Tensor, torch.linalg.vecdot(self._p_CV, self._logp_CV))

    def entropy_slope(self, times_C1: Tensor) -> Tensor:
        """How the entropies change with the logits, each times a number."""
        slope_CV = self._p_CV * (self._logp_CV + self.entropy()[:, None]) * -times_C1
        return slope_CV / self._shaping.divisor_N1

    def logp_slope(self, times_C1: Tensor) -> Tensor:
        """How the log-probabilities do. Uses up the distributions: asked last."""
        slope_CV = self._p_CV.mul_(-times_C1).scatter_add_(1, self._target_C1, times_C1)
        return slope_CV.div_(self._shaping.divisor_N1) if self._shaping.scales else slope_CV


class _FusedChunk:
    """The same on a GPU where nothing is cut off: of large tensors there are only the logits."""

    def __init__(self, job: _Job, part: slice, logits_CV: Tensor) -> None:
        assert kernels is not None
        self._plain = partial(_Chunk, job, part, logits_CV)
        self._logits_CV = logits_CV
        self._target_C = job.target_N[part].contiguous()
        self._divisor_C = job.shaping.part(part).divisor_N1[:, 0].contiguous()
        self.logp_C, self._entropy_C, self._normaliser_C = kernels.score(
            logits_CV, self._target_C, self._divisor_C
        )

    def entropy(self) -> Tensor:
        return self._entropy_C

    def entropy_slope(self, times_C1: Tensor) -> Tensor:
        return self._plain().entropy_slope(times_C1)

    def logp_slope(self, times_C1: Tensor) -> Tensor:
        assert kernels is not None
        return kernels.slope_into(
            self._logits_CV,
            self._target_C,
            self._divisor_C,
            self._normaliser_C,
            times_C1[:, 0].contiguous(),
        )


def _chunk(job: _Job, part: slice, logits_CV: Tensor) -> _Chunk | _FusedChunk:
    if kernels is None or job.shaping.truncates or not logits_CV.is_cuda:
        return _Chunk(job, part, logits_CV)
    return _FusedChunk(job, part, logits_CV.contiguous())


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, hidden_ND: Tensor, *trained: Tensor) -> tuple[Tensor, Tensor]:
        # Any: torch gives the context of a function no useful type.
        wanted = ctx.needs_input_grad[1]
        slopes = wanted and not trained
        logp: list[Tensor] = []
        entropy: list[Tensor] = []
        for_logp: list[Tensor] = []
        for_entropy: list[Tensor] = []
        for part in job.parts():
            hidden_CD = hidden_ND[part].detach().requires_grad_(slopes)
            with torch.set_grad_enabled(slopes):
                logits_CV = job.head(hidden_CD)
            chunk = _chunk(job, part, logits_CV.detach())
            logp.append(chunk.logp_C)
            entropy.append(chunk.entropy())
            if slopes:
                one_C1 = torch.ones_like(chunk.logp_C)[:, None]
                if job.entropy_slope:
                    for_entropy += torch.autograd.grad(
                        logits_CV, hidden_CD, chunk.entropy_slope(one_C1), retain_graph=True
                    )
                for_logp += torch.autograd.grad(logits_CV, hidden_CD, chunk.logp_slope(one_C1))
        ctx.job, ctx.trained = job, trained
        if slopes:
            ctx.slopes = torch.cat(for_logp), torch.cat(for_entropy) if for_entropy else None
        elif wanted:
            ctx.save_for_backward(hidden_ND)
        if not job.entropy_slope:
            ctx.mark_non_differentiable(whole := torch.cat(entropy))
            return torch.cat(logp), whole
        return torch.cat(logp), torch.cat(entropy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_logp_N1, of_entropy_N1 = (grad[:, None] for grad in grads)
        if ctx.trained:
            [hidden_ND] = ctx.saved_tensors
            return None, *_recomputed(ctx.job, hidden_ND, of_logp_N1, of_entropy_N1)
        for_logp_ND, for_entropy_ND = ctx.slopes
        slope_ND = for_logp_ND * of_logp_N1
        if for_entropy_ND is not None:
            slope_ND = slope_ND + for_entropy_ND * of_entropy_N1
        return None, slope_ND.to(for_logp_ND.dtype)


def _recomputed(
    job: _Job, hidden_ND: Tensor, of_logp_N1: Tensor, of_entropy_N1: Tensor
) -> list[Tensor]:
    """The gradients of hidden states and of the head's weights, which are summed in fp32."""
    trained = job.head.trained
    for_hidden: list[Tensor] = []
    sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in trained]
    for part in job.parts():
        hidden_CD = hidden_ND[part].detach().requires_grad_()
        with torch.enable_grad():
            logits_CV = job.head(hidden_CD)
        chunk = _chunk(job, part, logits_CV.detach())
        of_entropy_CV = chunk.entropy_slope(of_entropy_N1[part]) if job.entropy_slope else None
        slope_CV = chunk.logp_slope(of_logp_N1[part])
        if of_entropy_CV is not None:
            slope_CV += of_entropy_CV
        hidden_grad_CD, *weight_grads = torch.autograd.grad(
            logits_CV, (hidden_CD, *trained), slope_CV
        )
        for_hidden.append(hidden_grad_CD)
        for total, grad in zip(sums, weight_grads, strict=True):
            total += grad
    grads = [total.to(weight.dtype) for total, weight in zip(sums, trained, strict=True)]
    return [torch.cat(for_hidden), *grads]
