"""Chunked log-probabilities of sampled tokens: the logits of all tokens never exist at once.

Logits are the largest tensor of training: tokens times vocabulary. Here they exist for one chunk of
tokens at a time. A token's score depends on its own hidden state alone, so while the head is frozen
one vector, the score's gradient, is all the backward pass needs; where the head is trained, the
logits of each chunk are computed once more.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from whet.models.distribution import SamplingTransform, compute_log_probs
from whet.models.layers import LMHead

try:
    from whet.trainers import logprob_kernels as kernels
except ModuleNotFoundError:  # Triton comes only with a torch that has a GPU
    kernels = None

CHUNK_LOGITS = 2**26
"""Logits of a chunk: 256 MB, of which a few copies exist at once."""


class PolicyScores(NamedTuple):
    """Scores of sampled tokens by the current policy."""

    logp_N: Tensor
    """Log-probabilities in fp32 under the distribution they were sampled from."""
    entropy_N: Tensor
    """Entropies of that distribution."""


def score_tokens(
    hidden_ND: Tensor,
    head: LMHead,
    target_N: Tensor,
    transform: SamplingTransform,
    *,
    entropy_grad: bool = False,
    chunk_logits: int = CHUNK_LOGITS,
) -> PolicyScores:
    """Score the token that each hidden state predicts.

    The entropy has a gradient only if `entropy_grad`.
    """
    job = _ScoreJob(
        head, target_N, transform, entropy_grad, max(1, chunk_logits // head.vocabulary)
    )
    return PolicyScores(*cast(tuple[Tensor, Tensor], _Score.apply(job, hidden_ND, *head.trained)))


class _ScoreJob(NamedTuple):
    """Everything a score depends on, except the hidden states."""

    head: LMHead
    target_N: Tensor
    transform: SamplingTransform
    entropy_grad: bool
    chunk_tokens: int

    def split_parts(self) -> Iterator[slice]:
        for start in range(0, len(self.target_N), self.chunk_tokens):
            yield slice(start, start + self.chunk_tokens)


class _Chunk:
    """The distributions of a chunk of tokens; large and short-lived."""

    def __init__(self, job: _ScoreJob, part: slice, logits_CV: Tensor) -> None:
        self._transform = job.transform.select(part)
        self._target_C1 = job.target_N[part, None]
        logp_CV = compute_log_probs(logits_CV, self._transform, self._target_C1[:, 0])
        self.logp_C = logp_CV.gather(1, self._target_C1)[:, 0]
        self._p_CV = logp_CV.exp()
        if self._transform.truncates:  # 0 * -inf would be NaN
            logp_CV = logp_CV.masked_fill(logp_CV == -torch.inf, 0.0)
        self._logp_CV = logp_CV

    def compute_entropy(self) -> Tensor:
        return -cast(Tensor, torch.linalg.vecdot(self._p_CV, self._logp_CV))

    def compute_entropy_grad(self, grad_C1: Tensor) -> Tensor:
        """Gradient of the entropies with respect to the logits, times the incoming gradient."""
        grad_CV = self._p_CV * (self._logp_CV + self.compute_entropy()[:, None]) * -grad_C1
        return grad_CV / self._transform.divisor_N1

    def compute_logp_grad(self, grad_C1: Tensor) -> Tensor:
        """The same for the log-probabilities. Overwrites the distributions: call it last."""
        grad_CV = self._p_CV.mul_(-grad_C1).scatter_add_(1, self._target_C1, grad_C1)
        return grad_CV.div_(self._transform.divisor_N1) if self._transform.scales else grad_CV


class _FusedChunk:
    """A chunk by a fused kernel without a second large tensor: on a GPU, without top-p or top-k."""

    def __init__(self, job: _ScoreJob, part: slice, logits_CV: Tensor) -> None:
        assert kernels is not None
        self._plain = partial(_Chunk, job, part, logits_CV)
        self._logits_CV = logits_CV
        self._target_C = job.target_N[part].contiguous()
        self._divisor_C = job.transform.select(part).divisor_N1[:, 0].contiguous()
        self.logp_C, self._entropy_C, self._log_sum_C = kernels.score(
            logits_CV, self._target_C, self._divisor_C
        )

    def compute_entropy(self) -> Tensor:
        return self._entropy_C

    def compute_entropy_grad(self, grad_C1: Tensor) -> Tensor:
        return self._plain().compute_entropy_grad(grad_C1)

    def compute_logp_grad(self, grad_C1: Tensor) -> Tensor:
        assert kernels is not None
        return kernels.logp_grad_(
            self._logits_CV,
            self._target_C,
            self._divisor_C,
            self._log_sum_C,
            grad_C1[:, 0].contiguous(),
        )


def _build_chunk(job: _ScoreJob, part: slice, logits_CV: Tensor) -> _Chunk | _FusedChunk:
    if kernels is None or job.transform.truncates or not logits_CV.is_cuda:
        return _Chunk(job, part, logits_CV)
    return _FusedChunk(job, part, logits_CV.contiguous())


class _Score(torch.autograd.Function):
    """Scores with a hand-written backward pass."""

    @staticmethod
    def forward(
        ctx: Any, job: _ScoreJob, hidden_ND: Tensor, *trained: Tensor
    ) -> tuple[Tensor, Tensor]:
        # Any: torch has no useful type for the context of a function.
        needs_grad = ctx.needs_input_grad[1]
        grads_now = needs_grad and not trained  # a frozen head: while the logits are here
        logp: list[Tensor] = []
        entropy: list[Tensor] = []
        logp_grads: list[Tensor] = []
        entropy_grads: list[Tensor] = []
        for part in job.split_parts():
            hidden_CD = hidden_ND[part].detach().requires_grad_(grads_now)
            with torch.set_grad_enabled(grads_now):
                logits_CV = job.head(hidden_CD)
            chunk = _build_chunk(job, part, logits_CV.detach())
            logp.append(chunk.logp_C)
            entropy.append(chunk.compute_entropy())
            if grads_now:
                one_C1 = torch.ones_like(chunk.logp_C)[:, None]
                if job.entropy_grad:
                    entropy_grads += torch.autograd.grad(
                        logits_CV, hidden_CD, chunk.compute_entropy_grad(one_C1), retain_graph=True
                    )
                logp_grads += torch.autograd.grad(
                    logits_CV, hidden_CD, chunk.compute_logp_grad(one_C1)
                )
        ctx.job, ctx.trained = job, trained
        if grads_now:
            ctx.hidden_grads = (
                torch.cat(logp_grads),
                torch.cat(entropy_grads) if entropy_grads else None,
            )
        elif needs_grad or trained:  # with a trained head alone the hidden states need no gradient
            ctx.save_for_backward(hidden_ND)
        if not job.entropy_grad:
            ctx.mark_non_differentiable(whole := torch.cat(entropy))
            return torch.cat(logp), whole
        return torch.cat(logp), torch.cat(entropy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_logp_N1, of_entropy_N1 = (grad[:, None] for grad in grads)
        if ctx.trained:
            [hidden_ND] = ctx.saved_tensors
            return None, *_recompute_grads(ctx.job, hidden_ND, of_logp_N1, of_entropy_N1)
        logp_grad_ND, entropy_grad_ND = ctx.hidden_grads
        grad_ND = logp_grad_ND * of_logp_N1
        if entropy_grad_ND is not None:
            grad_ND = grad_ND + entropy_grad_ND * of_entropy_N1
        return None, grad_ND.to(logp_grad_ND.dtype)


def _recompute_grads(
    job: _ScoreJob, hidden_ND: Tensor, of_logp_N1: Tensor, of_entropy_N1: Tensor
) -> list[Tensor]:
    """Gradients of hidden states and of the head's weights, the latter summed in fp32."""
    trained = job.head.trained
    hidden_grads: list[Tensor] = []
    sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in trained]
    for part in job.split_parts():
        hidden_CD = hidden_ND[part].detach().requires_grad_()
        with torch.enable_grad():
            logits_CV = job.head(hidden_CD)
        chunk = _build_chunk(job, part, logits_CV.detach())
        of_entropy_CV = (
            chunk.compute_entropy_grad(of_entropy_N1[part]) if job.entropy_grad else None
        )
        grad_CV = chunk.compute_logp_grad(of_logp_N1[part])
        if of_entropy_CV is not None:
            grad_CV += of_entropy_CV
        hidden_grad_CD, *weight_grads = torch.autograd.grad(
            logits_CV, (hidden_CD, *trained), grad_CV
        )
        hidden_grads.append(hidden_grad_CD)
        for total, grad in zip(sums, weight_grads, strict=True):
            total += grad
    grads = [total.to(weight.dtype) for total, weight in zip(sums, trained, strict=True)]
    return [torch.cat(hidden_grads), *grads]
