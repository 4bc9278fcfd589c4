"""Draws the next token of many rows at once, each with its own settings and randomness."""

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from whet.engines.grammar import constrain
from whet.engines.request import Drawn, Request
from whet.errors import EngineError
from whet.policies.distribution import Shaping, log_probs


def draw(logits_BV: Tensor, requests: Sequence[Request]) -> list[Drawn]:
    """The next token of each row, exactly from the distribution whose log-probability it gets."""
    settings = [(r.sampling.temperature, r.sampling.top_p, r.sampling.top_k) for r in requests]
    shaping = Shaping.of(settings, logits_BV.device)
    logits_BV = constrain(logits_BV, [request.matcher for request in requests])
    logp_BV = log_probs(logits_BV, shaping)
    points = [request.random.random() for request in requests]
    sampled_B = _pick(logp_BV, torch.tensor(points, dtype=torch.float64, device=logp_BV.device))
    token_B = torch.where(shaping.temperature_N == 0, logp_BV.argmax(dim=-1), sampled_B)
    chosen_B = logp_BV.gather(1, token_B[:, None])[:, 0]
    tokens, logprobs = cast(list[int], token_B.tolist()), cast(list[float], chosen_B.tolist())
    if not all(map(math.isfinite, logprobs)):
        raise EngineError("the model's logits are not finite")
    return [Drawn(*one) for one in zip(tokens, logprobs, _tops(logp_BV, requests), strict=True)]


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


def _tops(logp_BV: Tensor, requests: Sequence[Request]) -> list[tuple[tuple[int, float], ...]]:
    most = min(max(r.sampling.top_logprobs for r in requests), logp_BV.shape[1])
    if most == 0:
        return [()] * len(requests)
    value_BK, id_BK = logp_BV.topk(most, dim=-1)
    ids = cast(list[list[int]], id_BK.tolist())
    values = cast(list[list[float]], value_BK.tolist())
    return [
        tuple((i, v) for i, v in zip(i_K, v_K, strict=True) if v > -math.inf)[
            : request.sampling.top_logprobs
        ]
        for request, i_K, v_K in zip(requests, ids, values, strict=True)
    ]
