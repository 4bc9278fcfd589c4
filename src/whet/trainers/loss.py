"""The losses of sampled tokens: pure functions. Sums, not means: the weights normalise.

    r   probability now over probability when sampled       A   advantage
    lp  log-probability now, q when sampled                  sg  without gradient

The ratio is to what the sampler reported, not to a second forward pass: where sampler and trainer
disagree it corrects for that, and `mismatch_kl` shows it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from whet.config import LossConfig
from whet.trainers.batch import Batch
from whet.trainers.scoring import Scores

LARGEST_LOG_RATIO = 20.0
"""Beyond it a ratio overflows, and zero times its gradient is no number."""


def total(
    scores: Scores, ratio_N: Tensor, reference_N: Tensor | None, batch: Batch, config: LossConfig
) -> Tensor:
    """The loss with its penalties. `reference_N` are log-probabilities before training."""
    loss_N = LOSSES[config.name](scores.logp_N, ratio_N, batch, config)
    if reference_N is not None:
        loss_N = loss_N + config.kl * divergence(scores.logp_N, reference_N)
    if config.entropy:
        loss_N = loss_N - config.entropy * scores.entropy_N
    return (loss_N * batch.weight_N).sum()


def ratios(logp_N: Tensor, batch: Batch, config: LossConfig) -> Tensor:
    """Of each token; for `gspo` of its row: the geometric mean over all the row's sampled tokens.

    A row is what one reward was given for. Turn by turn, how far the policy may move would depend
    on how an agent cuts its work into turns (arXiv:2507.18071 has one turn only).
    """
    log_ratio_N = logp_N - batch.sampled_N
    if config.name == "gspo":
        counted_N = torch.ones_like(logp_N) if batch.counted_N is None else batch.counted_N
        zero_R = log_ratio_N.new_zeros(batch.rows)
        sums_R = zero_R.index_add(0, batch.row_N, log_ratio_N.detach() * counted_N)
        mean_R = sums_R / zero_R.index_add(0, batch.row_N, counted_N).clamp(min=1)
        log_ratio_N = mean_R[batch.row_N] + logp_N - logp_N.detach()
    return log_ratio_N.clamp(max=LARGEST_LOG_RATIO).exp()


def divergence(logp_N: Tensor, reference_N: Tensor) -> Tensor:
    """An estimate of KL(policy || reference) that is never negative (joschu.net/blog/kl-approx)."""
    gap_N = (reference_N - logp_N).clamp(max=LARGEST_LOG_RATIO)
    return gap_N.exp() - gap_N - 1


def importance_sampling(
    logp_N: Tensor, ratio_N: Tensor, batch: Batch, config: LossConfig
) -> Tensor:
    """`-r A`: REINFORCE on tokens of another policy, each by how much likelier it is now."""
    return -_truncated(ratio_N, config) * batch.advantage_N


def ppo(logp_N: Tensor, ratio_N: Tensor, batch: Batch, config: LossConfig) -> Tensor:
    """`-min(r A, clip(r) A)` (arXiv:1707.06347), with more room above as DAPO (arXiv:2503.14476).

    `gspo` is the same with the ratio of the row.
    """
    clipped_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    free_N = _truncated(ratio_N, config)
    return -(free_N * batch.advantage_N).minimum(clipped_N * batch.advantage_N)


def cispo(logp_N: Tensor, ratio_N: Tensor, batch: Batch, config: LossConfig) -> Tensor:
    """`-sg(clip(r)) A lp` (arXiv:2506.13585): clipped tokens still teach."""
    weight_N = ratio_N.detach().clamp(1 - config.clip_low, 1 + config.clip_high)
    return -weight_N * batch.advantage_N * logp_N


def dro(logp_N: Tensor, ratio_N: Tensor, batch: Batch, config: LossConfig) -> Tensor:
    """`-(A lp - beta/2 (lp - q)^2)` (arXiv:2405.19107): a square instead of a ratio."""
    drift_N = logp_N - batch.sampled_N
    return config.beta / 2 * drift_N.square() - batch.advantage_N * logp_N


def cross_entropy(logp_N: Tensor, ratio_N: Tensor, batch: Batch, config: LossConfig) -> Tensor:
    """`-A lp`: the advantage says how much to imitate a token, whoever sampled it."""
    return -batch.advantage_N * logp_N


def _truncated(ratio_N: Tensor, config: LossConfig) -> Tensor:
    """Ratios whose gradient weighs at most `max_ratio`."""
    if config.max_ratio is None:
        return ratio_N
    return ratio_N * (config.max_ratio / ratio_N.detach()).clamp(max=1.0)


LOSSES: dict[str, Callable[[Tensor, Tensor, Batch, LossConfig], Tensor]] = {
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "gspo": ppo,
    "cispo": cispo,
    "dro": dro,
    "cross_entropy": cross_entropy,
}
