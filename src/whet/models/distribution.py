"""The sampling distribution: temperature, top-k and top-p, shared by sampler and trainer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whet.models.transfer import copy_to_device


@dataclass(frozen=True, slots=True)
class SamplingTransform:
    """Temperature, top-p and top-k of some positions, one entry per position."""

    temperature_N: Tensor
    """0 is greedy; its log-probabilities are those at temperature 1."""
    top_p_N: Tensor
    top_k_N: Tensor
    scales: bool
    """Whether any position has another temperature than 1."""
    truncates: bool
    """Whether any position uses top-p or top-k; the sort is skipped otherwise."""

    @classmethod
    def from_settings(
        cls,
        settings: Sequence[tuple[float, float, int]] | NDArray[np.float64],
        device: torch.device | str,
    ) -> "SamplingTransform":
        """Build from (temperature, top_p, top_k) of each position, as tuples or an array (N, 3)."""
        temperature_N, top_p_N, top_k_N = np.array(settings, np.float64).T
        # Greedy sampling takes the most likely token whatever top-p and top-k cut off, and its
        # log-probability is that of the whole distribution.
        top_p_N[temperature_N == 0], top_k_N[temperature_N == 0] = 1.0, 0.0
        copied_3N = copy_to_device(
            np.stack([temperature_N, top_p_N, top_k_N]), torch.device(device)
        )
        return cls(
            copied_3N[0].float(),
            copied_3N[1].float(),
            copied_3N[2].long(),
            not np.isin(temperature_N, (0, 1)).all(),
            bool((top_p_N < 1).any() or (top_k_N > 0).any()),
        )

    @property
    def divisor_N1(self) -> Tensor:
        """The divisor of the logits: the temperature, or 1 where greedy."""
        return self.temperature_N.masked_fill(self.temperature_N == 0, 1.0)[:, None]

    def select(self, which: slice | Tensor) -> "SamplingTransform":
        """Select positions by slice or by index."""
        return SamplingTransform(
            self.temperature_N[which],
            self.top_p_N[which],
            self.top_k_N[which],
            self.scales,
            self.truncates,
        )

    def to(self, device: torch.device) -> "SamplingTransform":
        """Copy to a device's memory."""
        return replace(
            self,
            temperature_N=self.temperature_N.to(device),
            top_p_N=self.top_p_N.to(device),
            top_k_N=self.top_k_N.to(device),
        )


def compute_log_probs(
    logits_NV: Tensor, transform: SamplingTransform, sampled_N: Tensor | None = None
) -> Tensor:
    """Compute log-probabilities in fp32 of the distribution that is actually sampled from.

    Tokens excluded by top-k or top-p get minus infinity, and the rest is normalized again.
    Tokens known to have been sampled, `sampled_N`, are always kept, even where a forward pass that
    rounds differently would put them just past the edge.
    """
    logits_NV = logits_NV.float()
    if transform.scales:
        logits_NV = logits_NV / transform.divisor_N1
    logp_NV = torch.log_softmax(logits_NV, dim=-1)
    if not transform.truncates:
        return logp_NV
    kept_NV = _select_kept(logp_NV.detach(), transform)
    if sampled_N is not None:
        kept_NV = kept_NV.scatter(1, sampled_N[:, None], True)
    return torch.log_softmax(logp_NV.masked_fill(~kept_NV, float("-inf")), dim=-1)


def _select_kept(logp_NV: Tensor, transform: SamplingTransform) -> Tensor:
    """Mask of kept tokens: the k most probable, then the fewest of those with top-p mass."""
    vocabulary = logp_NV.shape[1]
    order_NV = logp_NV.argsort(dim=-1, descending=True, stable=True)
    sorted_NV = logp_NV.gather(1, order_NV)
    rank_V = torch.arange(vocabulary, device=logp_NV.device)
    k_N1 = transform.top_k_N.masked_fill(transform.top_k_N == 0, vocabulary)[:, None]
    in_k_NV = rank_V[None, :] < k_N1
    mass_NV = torch.softmax(sorted_NV.masked_fill(~in_k_NV, float("-inf")), dim=-1)
    before_NV = mass_NV.cumsum(dim=-1) - mass_NV
    top_p_N1 = transform.top_p_N[:, None]
    # The sum may round up to 1 before the last token, but top-p 1 must keep all tokens.
    kept_sorted_NV = in_k_NV & ((before_NV < top_p_N1) | (top_p_N1 >= 1))
    kept_sorted_NV[:, 0] = True
    return torch.zeros_like(kept_sorted_NV).scatter(1, order_NV, kept_sorted_NV)
