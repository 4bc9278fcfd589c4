"""The distribution that tokens are sampled from: temperature, top-k and top-p."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.models.distribution import SamplingTransform, compute_log_probs

LOGITS = torch.tensor([[math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]])


def probabilities(temperature: float = 1, top_p: float = 1, top_k: int = 0) -> list[float]:
    transform = SamplingTransform.from_settings([(temperature, top_p, top_k)], "cpu")
    return compute_log_probs(LOGITS, transform)[0].exp().tolist()


def test_temperature_is_a_power() -> None:
    squares = [p * p for p in (0.4, 0.3, 0.2, 0.1)]
    assert probabilities(0.5) == pytest.approx([s / sum(squares) for s in squares])


def test_greedy_has_the_log_probabilities_of_temperature_one() -> None:
    assert probabilities(0) == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_top_k_keeps_the_likeliest_and_normalizes_again() -> None:
    assert probabilities(top_k=2) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert probabilities(top_k=9) == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_top_p_keeps_the_fewest_that_hold_the_mass() -> None:
    assert probabilities(top_p=0.69) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert probabilities(top_p=0.71) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])
    assert probabilities(top_p=0.01) == pytest.approx([1, 0, 0, 0])


def test_top_p_applies_after_top_k() -> None:
    # 4/7 alone holds 0.57 of the two that are left, but only 0.4 of all.
    assert probabilities(top_k=2, top_p=0.5) == pytest.approx([1, 0, 0, 0])


def test_a_row_is_not_cut_because_others_are() -> None:
    """A sum of 100,000 small numbers reaches 1 too early; no limit must stay no limit."""
    logits_V = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    both_NV = compute_log_probs(
        logits_V.expand(2, -1), SamplingTransform.from_settings([(1, 1, 0), (1, 0.5, 0)], "cpu")
    )
    alone_NV = compute_log_probs(
        logits_V[None], SamplingTransform.from_settings([(1, 1, 0)], "cpu")
    )
    assert both_NV[0].isfinite().all()
    assert torch.allclose(both_NV[0], alone_NV[0], atol=1e-5)
    assert not both_NV[1].isfinite().all()


def test_a_token_known_to_be_sampled_is_not_cut() -> None:
    transform = SamplingTransform.from_settings([(1, 0.69, 0)], "cpu")
    p_V = compute_log_probs(LOGITS, transform, torch.tensor([2]))[0].exp()
    assert p_V.tolist() == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])


def test_equal_logits_are_cut_in_a_fixed_order() -> None:
    transform = SamplingTransform.from_settings([(1, 1, 2)], "cpu")
    assert compute_log_probs(torch.zeros(1, 5), transform)[0].exp().tolist() == [0.5, 0.5, 0, 0, 0]


settings_of_a_row = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 2.5]), st.sampled_from([1.0, 0.9, 0.2]), st.integers(0, 12)
)


@given(st.lists(settings_of_a_row, min_size=1, max_size=6), st.integers(0, 2**31))
@settings(max_examples=60)
def test_every_row_is_a_distribution_of_its_own(
    rows: list[tuple[float, float, int]], seed: int
) -> None:
    logits_NV = torch.randn(len(rows), 10, generator=torch.Generator().manual_seed(seed)).half()
    logp_NV = compute_log_probs(logits_NV, SamplingTransform.from_settings(rows, "cpu"))
    assert logp_NV.dtype == torch.float32
    assert torch.allclose(logp_NV.exp().sum(dim=-1), torch.ones(len(rows)), atol=1e-5)
    for index, row in enumerate(rows):
        alone_1V = compute_log_probs(
            logits_NV[index : index + 1], SamplingTransform.from_settings([row], "cpu")
        )
        assert torch.allclose(logp_NV[index], alone_1V[0], atol=1e-5)
        if row[2] and row[0]:  # greedy rows are not cut
            assert int(logp_NV[index].isfinite().sum()) <= row[2]


def test_greedy_log_probs_ignore_top_p_and_top_k() -> None:
    logits_NV = torch.tensor([[2.0, 1.0, 0.0]])
    plain = compute_log_probs(logits_NV, SamplingTransform.from_settings([(0.0, 1.0, 0)], "cpu"))
    cut = compute_log_probs(logits_NV, SamplingTransform.from_settings([(0.0, 0.5, 1)], "cpu"))
    assert torch.equal(plain, cut)
    assert cut[0, 0] < 0
