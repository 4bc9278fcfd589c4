"""The losses of sampled tokens: pure functions. Sums, not means: the weights normalize.

    r   probability now over probability when sampled       A   advantage
    lp  log-probability now, q when sampled                  sg  without gradient

By default the ratio is to what the sampler reported, not to a second forward pass: where sampler
and trainer disagree it corrects for that, and `mismatch_kl` shows it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from whet.config import LossConfig
from whet.errors import ConfigError
from whet.trainers.logprobs import PolicyScores
from whet.trainers.packing import Batch

MAX_LOG_RATIO = 20.0
"""Beyond it a ratio overflows, and zero times its gradient is NaN."""


LossFunction = Callable[[Tensor, Tensor, Batch, LossConfig], Tensor]
"""Maps log-probabilities now, ratios, the batch and the config to the loss of each token."""


def compute_total_loss(
    scores: PolicyScores,
    ratio_N: Tensor,
    reference_N: Tensor | None,
    batch: Batch,
    config: LossConfig,
    custom: LossFunction | None = None,
) -> Tensor:
    """Sum the loss and its penalties. `reference_N` are log-probabilities before training."""
    loss_N = (custom or LOSSES[config.name])(scores.logp_N, ratio_N, batch, config)
    if custom:
        _check_custom(loss_N, scores.logp_N, config)
    if config.correction:
        loss_N = loss_N * compute_corrections(scores.logp_N, batch, config)
    if reference_N is not None:
        loss_N = loss_N + config.kl * estimate_kl(scores.logp_N, reference_N)
    if config.entropy:
        loss_N = loss_N - config.entropy * scores.entropy_N
    return (loss_N * batch.weight_N).sum()


def compute_ratios(logp_N: Tensor, batch: Batch, config: LossConfig) -> Tensor:
    """Probability ratio of each token; for `gspo` the geometric mean over its row's sampled tokens.

    A row is what one reward was given for. Turn by turn, how far the policy may move would depend
    on how an agent cuts its work into turns (arXiv:2507.18071 has one turn only).
    """
    log_ratio_N = logp_N - _compute_old_logprobs(logp_N, batch, config)
    if config.name == "gspo":
        counted_N = torch.ones_like(logp_N) if batch.counted_N is None else batch.counted_N
        tokens_N = _sum_rows(counted_N, batch).clamp(min=1)
        mean_N = _sum_rows(log_ratio_N.detach() * counted_N, batch) / tokens_N
        log_ratio_N = mean_N + logp_N - logp_N.detach()
    return log_ratio_N.clamp(max=MAX_LOG_RATIO).exp()


def clip_ratios(ratio_N: Tensor, batch: Batch, config: LossConfig) -> Tensor:
    """The ratios within the range of each token, or that of the loss."""
    if batch.clip_N is not None:
        return ratio_N.clamp(*batch.clip_N)
    return ratio_N.clamp(*config.clip_range)


def compute_corrections(logp_N: Tensor, batch: Batch, config: LossConfig) -> Tensor:
    """Factor of each token's loss that bounds its importance weight, without a gradient.

    The weight is the trainer's probability over the sampler's, of a token or of the sampled tokens
    of its row. A ratio to the sampler has this weight in it already.
    """
    weight_N = _compute_importance_weights(logp_N, batch, config)
    if config.correction in ("token_truncate", "sequence_truncate"):
        factor_N = (config.correction_max / weight_N).clamp(max=1.0)
    else:
        factor_N = (~_is_beyond(weight_N, config)).float()
    return factor_N if config.old_logprobs == "sampler" else factor_N * weight_N


def count_corrected(logp_N: Tensor, batch: Batch, config: LossConfig) -> Tensor:
    """Number of tokens whose importance weight was truncated or masked."""
    return _is_beyond(_compute_importance_weights(logp_N, batch, config), config).sum()


def _compute_importance_weights(logp_N: Tensor, batch: Batch, config: LossConfig) -> Tensor:
    in_ratio = config.old_logprobs == "sampler"
    known_N = logp_N.detach() if in_ratio else _compute_old_logprobs(logp_N, batch, config)
    log_weight_N = known_N - batch.sampled_N
    if config.correction in ("sequence_truncate", "sequence_mask"):
        log_weight_N = _sum_rows(log_weight_N, batch)
    return log_weight_N.clamp(max=MAX_LOG_RATIO).exp()


def _is_beyond(weight_N: Tensor, config: LossConfig) -> Tensor:
    return (weight_N > config.correction_max) | (weight_N < config.correction_min)


def _compute_old_logprobs(logp_N: Tensor, batch: Batch, config: LossConfig) -> Tensor:
    """Log-probabilities that ratios are relative to."""
    if config.old_logprobs == "sampler":
        return batch.sampled_N
    # Not computed where there is one update alone: they are those of this very pass.
    return logp_N.detach() if batch.old_N is None else batch.old_N


def _sum_rows(values_N: Tensor, batch: Batch) -> Tensor:
    """For each token the sum over its row."""
    return values_N.new_zeros(batch.rows).index_add(0, batch.row_N, values_N)[batch.row_N]


def _check_custom(loss_N: object, logp_N: Tensor, config: LossConfig) -> None:
    if isinstance(loss_N, Tensor) and loss_N.shape == logp_N.shape:
        return
    found = f"shape {tuple(loss_N.shape)}" if isinstance(loss_N, Tensor) else repr(loss_N)[:80]
    raise ConfigError(
        f"the loss {config.name!r} returned {found}; expected a number for each token, "
        f"of shape {tuple(logp_N.shape)}"
    )


def estimate_kl(logp_N: Tensor, reference_N: Tensor) -> Tensor:
    """An estimate of KL(policy || reference) that is never negative (joschu.net/blog/kl-approx)."""
    gap_N = (reference_N - logp_N).clamp(max=MAX_LOG_RATIO)
    return gap_N.exp() - gap_N - 1


def importance_sampling(
    logp_N: Tensor, ratio_N: Tensor, batch: Batch, config: LossConfig
) -> Tensor:
    """`-r A`: REINFORCE on tokens of another policy, each by how much likelier it is now."""
    return -ratio_N * batch.advantage_N


def ppo(logp_N: Tensor, ratio_N: Tensor, batch: Batch, config: LossConfig) -> Tensor:
    """`-min(r A, clip(r) A)` (arXiv:1707.06347), with more room above as DAPO (arXiv:2503.14476).

    Where A is negative at least `c A`, the dual clip (arXiv:1912.09729): one token that became
    much likelier would outweigh all others. `gspo` is the same with the ratio of the row.
    """
    advantage_N = batch.advantage_N
    gain_N = torch.minimum(ratio_N * advantage_N, clip_ratios(ratio_N, batch, config) * advantage_N)
    if config.dual_clip is None:
        return -gain_N
    bounded_N = torch.maximum(gain_N, config.dual_clip * advantage_N)
    return -torch.where(advantage_N < 0, bounded_N, gain_N)


def cispo(logp_N: Tensor, ratio_N: Tensor, batch: Batch, config: LossConfig) -> Tensor:
    """`-sg(clip(r)) A lp` (arXiv:2506.13585): clipped tokens still teach."""
    weight_N = clip_ratios(ratio_N.detach(), batch, config)
    return -weight_N * batch.advantage_N * logp_N


def dro(logp_N: Tensor, ratio_N: Tensor, batch: Batch, config: LossConfig) -> Tensor:
    """`-(A lp - beta/2 (lp - q)^2)` (arXiv:2405.19107): a square instead of a ratio."""
    drift_N = logp_N - batch.sampled_N
    return config.beta / 2 * drift_N.square() - batch.advantage_N * logp_N


def cross_entropy(logp_N: Tensor, ratio_N: Tensor, batch: Batch, config: LossConfig) -> Tensor:
    """`-A lp`: imitation of tokens from any source, weighted by the advantage."""
    return -batch.advantage_N * logp_N


LOSSES: dict[str, LossFunction] = {
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "gspo": ppo,
    "cispo": cispo,
    "dro": dro,
    "cross_entropy": cross_entropy,
}
