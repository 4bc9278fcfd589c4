"""Policy losses: pure functions over sampled tokens. Sums, not means: the weights normalise."""

from collections.abc import Callable

from torch import Tensor

from whet.config import LossConfig


def importance_sampling(
    ratio_N: Tensor, advantage_N: Tensor, weight_N: Tensor, config: LossConfig
) -> Tensor:
    """REINFORCE on tokens of another policy: each counts by how much likelier it is now."""
    return -(ratio_N * advantage_N * weight_N).sum()


def ppo(ratio_N: Tensor, advantage_N: Tensor, weight_N: Tensor, config: LossConfig) -> Tensor:
    """Clipped importance sampling (arXiv:1707.06347), with room above as DAPO (arXiv:2503.14476).

    The ratio is to the probability the sampler reported, not to a second forward pass: where
    sampler and trainer disagree it corrects for that, and `mismatch_kl` shows it.
    """
    clipped_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    gain_N = (ratio_N * advantage_N).minimum(clipped_N * advantage_N)
    return -(gain_N * weight_N).sum()


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, LossConfig], Tensor]] = {
    "importance_sampling": importance_sampling,
    "ppo": ppo,
}
