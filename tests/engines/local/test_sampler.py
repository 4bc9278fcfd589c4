"""The sampler: tokens come with their probabilities, each row with its own settings."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from whet.engines.local.sampler import NextTokens, draw_uniform_numbers, sample_tokens
from whet.errors import EngineError
from whet.models.distribution import SamplingTransform, compute_log_probs
from whet.types import Sampling


def sample_with(
    logits_BV: Tensor, samplings: Sequence[Sampling], *, uniform: float | None = None
) -> NextTokens:
    transform = SamplingTransform.from_settings(
        [(s.temperature, s.top_p, s.top_k) for s in samplings], "cpu"
    )
    rows = len(samplings)
    uniform_B = draw_uniform_numbers(np.arange(rows).astype(np.uint64), np.zeros(rows, np.int64))
    if uniform is not None:
        uniform_B = np.full(rows, uniform)
    return sample_tokens(logits_BV, transform, uniform_B, tops=[s.top_logprobs for s in samplings])


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.4, "top_k": 25},
        {"top_p": 0.85},
        {"temperature": 1.2, "top_k": 40, "top_p": 0.7},
    ],
    ids=str,
)
def test_tokens_are_sampled_with_their_probability(sampling: dict[str, float]) -> None:
    rows, vocabulary = 30_000, 60
    logits_V = 1.5 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(0))
    chosen = Sampling.model_validate(sampling)
    drawn = sample_with(logits_V.expand(rows, -1), [chosen] * rows)
    transform = SamplingTransform.from_settings(
        [(chosen.temperature, chosen.top_p, chosen.top_k)], "cpu"
    )
    p_V = compute_log_probs(logits_V[None], transform)[0].double().exp()
    count_V = torch.from_numpy(drawn.token_B).bincount(minlength=vocabulary)
    assert count_V[p_V == 0].sum() == 0, "a token that was cut off was sampled"
    possible = p_V > 0
    expected = rows * p_V[possible]
    chi_square = ((count_V[possible] - expected) ** 2 / expected).sum().item()
    freedom = int(possible.sum()) - 1
    assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)
    assert drawn.logprob_B == pytest.approx(p_V[drawn.token_B].log().numpy(), abs=1e-5)


@pytest.mark.parametrize("uniform", [0.0, 0.5, math.nextafter(1.0, 0.0)])
def test_the_ends_of_the_unit_interval_pick_tokens_that_can_be_sampled(uniform: float) -> None:
    logits_V = torch.full((1000,), -math.inf)
    logits_V[[3, 500, 700]] = torch.tensor([0.3, 0.1, 0.2])
    drawn = sample_with(logits_V[None], [Sampling()], uniform=uniform)
    assert drawn.token_B == {0.0: 3, 0.5: 500}.get(uniform, 700)


def test_rows_have_their_own_settings() -> None:
    logits_BV = torch.arange(10.0).log().expand(4, -1)
    samplings = [
        Sampling(temperature=0, top_logprobs=2),
        Sampling(top_k=1),
        Sampling(temperature=5.0),
        Sampling(top_logprobs=20),
    ]
    token_B, logprob_B, tops = sample_with(logits_BV, samplings)
    assert token_B[:2].tolist() == [9, 9]
    assert logprob_B[:2] == pytest.approx([math.log(9 / 45), 0])
    assert tops is not None
    assert tops[0] == (
        (9, pytest.approx(math.log(9 / 45))),
        (8, pytest.approx(math.log(8 / 45))),
    )
    assert tops[1] == tops[2] == ()
    assert len(tops[3]) == 9, "all that have a probability"


def test_logits_that_are_no_numbers_are_an_error() -> None:
    logits_BV = torch.zeros(2, 10)
    logits_BV[1, 4] = float("nan")
    with pytest.raises(EngineError, match="not finite"):
        sample_with(logits_BV, [Sampling()] * 2)


def test_points_are_even_and_of_their_seed_and_index_alone() -> None:
    seeds, indices = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(500))
    uniform = draw_uniform_numbers(seeds, indices)
    assert ((uniform >= 0) & (uniform < 1)).all()
    count, _ = np.histogram(uniform, bins=100)
    assert ((count - 1000) ** 2 / 1000).sum() < 99 + 4 * math.sqrt(2 * 99)
    assert abs(np.corrcoef(uniform[:, 0], uniform[:, 1])[0, 1]) < 0.2
    assert draw_uniform_numbers(seeds[7:8, 3], indices[7:8, 3]) == uniform[7, 3]
