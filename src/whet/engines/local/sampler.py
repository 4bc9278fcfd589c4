"""Samples the next token of many rows at once, each with its own settings and randomness."""

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whet.engines.local.grammar import Matcher, mask_logits
from whet.engines.request import TopLogprobs
from whet.errors import EngineError
from whet.models.distribution import SamplingTransform, compute_log_probs
from whet.models.transfer import copy_to_device


class NextTokens(NamedTuple):
    """One token for each row."""

    token_B: NDArray[np.int64]
    logprob_B: NDArray[np.float32]
    tops: list[TopLogprobs] | None
    """The most probable tokens of each row, if any row requests them."""


def sample_tokens(
    logits_BV: Tensor,
    transform: SamplingTransform,
    uniform_B: NDArray[np.float64],
    *,
    matchers: Sequence[Matcher | None] = (),
    tops: Sequence[int] = (),
) -> NextTokens:
    """Sample a token for each row, exactly from the distribution its log-probability is of.

    `uniform_B` are random numbers of [0, 1); `tops` is the number of top log-probabilities that
    each row requests. The results of all rows reach the host in one transfer.
    """
    logp_BV = compute_log_probs(mask_logits(logits_BV, matchers), transform)
    sampled_B = _invert_cdf(logp_BV, copy_to_device(uniform_B, logp_BV.device))
    token_B = torch.where(transform.temperature_N == 0, logp_BV.argmax(dim=-1), sampled_B)
    chosen_B = logp_BV.gather(1, token_B[:, None])[:, 0]
    # One transfer: float64 holds every id and every fp32 number.
    token_and_logprob = torch.stack([token_B.double(), chosen_B.double()]).cpu().numpy()
    logprob_B = token_and_logprob[1].astype(np.float32)
    if not np.isfinite(logprob_B).all():
        raise EngineError("the model's logits are not finite")
    most = min(max(tops, default=0), logp_BV.shape[1])
    top_logprobs = _list_top_logprobs(logp_BV, tops, most) if most else None
    return NextTokens(token_and_logprob[0].astype(np.int64), logprob_B, top_logprobs)


def draw_uniform_numbers(
    seed_B: NDArray[np.uint64], index_B: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Random numbers of [0, 1) by SplitMix64 (doi:10.1145/2714064.2660195).

    A function of seed and token index alone, so that a row's samples do not depend on the other
    rows of the batch.
    """
    step = np.uint64(0x9E3779B97F4A7C15)
    state_B = _scramble(seed_B + step) + (index_B.astype(np.uint64) + np.uint64(1)) * step
    return (_scramble(state_B) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _scramble(z_B: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z_B = (z_B ^ (z_B >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z_B = (z_B ^ (z_B >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z_B ^ (z_B >> np.uint64(31))


def _invert_cdf(logp_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The token in whose share of the probability each number of [0, 1) falls.

    One random number per row: Gumbel noise for the whole vocabulary costs more than the LM head.
    """
    cumulative_BV = logp_BV.exp().cumsum(dim=-1, dtype=torch.float64)
    total_B1 = cumulative_BV[:, -1:]
    # Below the total even if the product rounds up, so that the token found has a probability.
    below_B1 = torch.minimum(
        uniform_B[:, None] * total_B1, total_B1.nextafter(torch.zeros_like(total_B1))
    )
    index_B1 = torch.searchsorted(cumulative_BV, below_B1, right=True)
    return index_B1[:, 0].clamp(max=logp_BV.shape[1] - 1)


def _list_top_logprobs(logp_BV: Tensor, tops: Sequence[int], most: int) -> list[TopLogprobs]:
    value_BK, id_BK = logp_BV.topk(most, dim=-1)
    ids = cast(list[list[int]], id_BK.tolist())
    values = cast(list[list[float]], value_BK.tolist())
    return [
        tuple((i, v) for i, v in zip(i_K, v_K, strict=True) if v > -math.inf)[:wanted]
        for wanted, i_K, v_K in zip(tops, ids, values, strict=True)
    ]
