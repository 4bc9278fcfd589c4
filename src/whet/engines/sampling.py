"""Draws the next token of many rows at once, each with its own settings and randomness."""

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whet.engines.grammar import Matcher, constrain
from whet.engines.request import Top
from whet.errors import EngineError
from whet.policies.distribution import Shaping, log_probs


class Draws(NamedTuple):
    """One token for each row."""

    token_B: NDArray[np.int64]
    logprob_B: NDArray[np.float32]
    tops: list[Top] | None
    """The likeliest tokens of each row, if any row asks for them."""


def draw(
    logits_BV: Tensor,
    shaping: Shaping,
    point_B: NDArray[np.float64],
    *,
    matchers: Sequence[Matcher | None] = (),
    tops: Sequence[int] = (),
) -> Draws:
    """The next token of each row, exactly from the distribution whose log-probability it gets.

    `point_B` are random numbers of [0, 1); `tops` is how many of the likeliest each row asks for.
    What comes back is awaited once for all rows.
    """
    logp_BV = log_probs(constrain(logits_BV, matchers), shaping)
    sampled_B = _pick(logp_BV, torch.from_numpy(point_B).to(logp_BV.device))
    token_B = torch.where(shaping.temperature_N == 0, logp_BV.argmax(dim=-1), sampled_B)
    chosen_B = logp_BV.gather(1, token_B[:, None])[:, 0]
    # One transfer: float64 holds every id and every fp32 number.
    token_and_logprob = torch.stack([token_B.double(), chosen_B.double()]).cpu().numpy()
    logprob_B = token_and_logprob[1].astype(np.float32)
    if not np.isfinite(logprob_B).all():
        raise EngineError("the model's logits are not finite")
    most = min(max(tops, default=0), logp_BV.shape[1])
    likeliest = _tops(logp_BV, tops, most) if most else None
    return Draws(token_and_logprob[0].astype(np.int64), logprob_B, likeliest)


def _pick(logp_BV: Tensor, point_B: Tensor) -> Tensor:
    """The token in whose share of the probability each point of [0, 1) falls.

    One random number a row: noise for the whole vocabulary costs more than the model's head.
    """
    cumulative_BV = logp_BV.exp().cumsum(dim=-1, dtype=torch.float64)
    total_B1 = cumulative_BV[:, -1:]
    # Below the total even if the product rounds up, so the token found has a share.
    below_B1 = torch.minimum(
        point_B[:, None] * total_B1, total_B1.nextafter(torch.zeros_like(total_B1))
    )
    index_B1 = torch.searchsorted(cumulative_BV, below_B1, right=True)
    return index_B1[:, 0].clamp(max=logp_BV.shape[1] - 1)


def _tops(logp_BV: Tensor, tops: Sequence[int], most: int) -> list[Top]:
    value_BK, id_BK = logp_BV.topk(most, dim=-1)
    ids = cast(list[list[int]], id_BK.tolist())
    values = cast(list[list[float]], value_BK.tolist())
    return [
        tuple((i, v) for i, v in zip(i_K, v_K, strict=True) if v > -math.inf)[:wanted]
        for wanted, i_K, v_K in zip(tops, ids, values, strict=True)
    ]
