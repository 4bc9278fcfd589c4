"""Every loss by hand: the arithmetic is in the tests."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from whet.config import LossConfig
from whet.errors import ConfigError
from whet.models.distribution import SamplingTransform
from whet.trainers.logprobs import PolicyScores
from whet.trainers.loss import LOSSES, compute_ratios, compute_total_loss, estimate_kl
from whet.trainers.packing import Batch

Q = -1.5
"""Log-probability of every token when it was sampled."""


def batch_of(
    advantages: list[float], *, weights: list[float] | None = None, rows: list[int] | None = None
) -> Batch:
    n = len(advantages)
    row_N = torch.tensor(rows or [0] * n)
    return Batch(
        source_N=torch.zeros(n, dtype=torch.long),
        target_N=torch.zeros(n, dtype=torch.long),
        row_N=row_N,
        rows=int(row_N.max()) + 1,
        version_N=torch.zeros(n, dtype=torch.long),
        sampled_N=torch.full((n,), Q),
        advantage_N=torch.tensor(advantages),
        weight_N=torch.tensor(weights or [1.0] * n),
        transform=SamplingTransform.from_settings([(1, 1, 0)] * n, "cpu"),
    )


def outcome(
    log_ratios: list[float],
    batch: Batch,
    *,
    reference: list[float] | None = None,
    **settings: Any,
) -> tuple[float, list[float]]:
    """The loss of tokens whose log-probability moved by this much, and its slope in each."""
    logp_N = (torch.tensor(log_ratios) + Q).requires_grad_()
    config = LossConfig.model_validate(settings)
    scores = PolicyScores(logp_N, torch.zeros(len(log_ratios)))
    reference_N = torch.tensor(reference) if reference else None
    value = compute_total_loss(
        scores, compute_ratios(logp_N, batch, config), reference_N, batch, config
    )
    [slope_N] = torch.autograd.grad(value, logp_N)
    return value.item(), slope_N.tolist()


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_the_gradient_is_minus_advantage_times_weight(
    name: str, advantage: float
) -> None:
    _, slopes = outcome([0.0], batch_of([advantage], weights=[0.5]), name=name)
    assert slopes == [pytest.approx(-advantage * 0.5)]


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_sums(name: str) -> None:
    moves, advantages, weights = [0.1, -0.1, 0.05], [1.0, 2.0, -4.0], [1.0, 0.5, 0.25]
    alone = [
        outcome([m], batch_of([a], weights=[w]), name=name)[0]
        for m, a, w in zip(moves, advantages, weights, strict=True)
    ]
    together, _ = outcome(moves, batch_of(advantages, weights=weights, rows=[0, 1, 2]), name=name)
    assert together == pytest.approx(sum(alone), rel=1e-5)


@pytest.mark.parametrize("move", [-2.3, 0.0, 2.2])
def test_importance_sampling_is_the_ratio_times_the_advantage(move: float) -> None:
    value, [slope] = outcome([move], batch_of([3.0]), name="importance_sampling")
    assert value == pytest.approx(-math.exp(move) * 3)
    assert slope == pytest.approx(-math.exp(move) * 3)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.27, 1.0, -1.27, -1.27),
        (1.29, 1.0, -1.28, 0.0),  # likelier already: enough
        (0.5, 1.0, -0.5, -0.5),  # good but rarer: bring it back
        (0.81, -1.0, 0.81, 0.81),
        (0.79, -1.0, 0.8, 0.0),  # rarer already: enough
        (1.5, -1.0, 1.5, 1.5),  # bad but likelier: push it down
    ],
)
@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_ppo_stops_beyond_the_clip_in_the_direction_it_pushed(
    name: str, ratio: float, advantage: float, value: float, slope: float
) -> None:
    clip: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}
    found = outcome([math.log(ratio)], batch_of([advantage]), name=name, **clip)
    assert found == (pytest.approx(value), [pytest.approx(slope, abs=1e-6)])


def test_gspo_has_one_ratio_for_a_row_the_geometric_mean_of_its_tokens() -> None:
    # Row 0: (0.3 + 0.1 - 0.1) / 3 = 0.1, and e^0.1 is inside the clip. Row 1: e^0.5 is outside.
    batch = batch_of([2.0, 2.0, 2.0, 1.0], rows=[0, 0, 0, 1])
    value, slopes = outcome([0.3, 0.1, -0.1, 0.5], batch, name="gspo", clip_high=0.28)
    s = math.exp(0.1)
    assert value == pytest.approx(-3 * 2 * s - 1.28)
    assert slopes == [pytest.approx(-2 * s)] * 3 + [0.0]


@pytest.mark.parametrize(
    ("ratio", "weight"), [(0.5, 0.8), (0.9, 0.9), (1.2, 1.2), (1.5, 1.28), (30.0, 1.28)]
)
@pytest.mark.parametrize("advantage", [1.0, -3.0])
def test_cispo_clips_the_weight_and_drops_no_token(
    ratio: float, weight: float, advantage: float
) -> None:
    move = math.log(ratio)
    clip: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}
    value, [slope] = outcome([move], batch_of([advantage]), name="cispo", **clip)
    assert value == pytest.approx(-weight * advantage * (Q + move), rel=1e-5)
    assert slope == pytest.approx(-weight * advantage, rel=1e-5)


def test_dro_is_held_near_the_sampler_by_a_square() -> None:
    value, [slope] = outcome([0.4], batch_of([3.0]), name="dro", beta=0.5)
    assert value == pytest.approx(-3 * (Q + 0.4) + 0.5 / 2 * 0.4**2)
    assert slope == pytest.approx(-3 + 0.5 * 0.4)


def test_cross_entropy_ignores_the_sampled_log_probability() -> None:
    value, slopes = outcome([0.7, -3.0], batch_of([1.0, 0.5]), name="cross_entropy")
    assert value == pytest.approx(-(Q + 0.7) - 0.5 * (Q - 3.0))
    assert slopes == [-1.0, -0.5]


def test_a_bad_token_that_became_much_likelier_has_no_gradient_beyond_the_dual_clip() -> None:
    batch = batch_of([-2.0, -2.0, 2.0], rows=[0, 1, 2])
    moves = [math.log(r) for r in (2.9, 1e4, 1e4)]
    value, slopes = outcome(moves, batch)
    assert slopes == [pytest.approx(2 * 2.9, rel=1e-5), 0, 0]
    assert value == pytest.approx(2 * 2.9 + 2 * 3.0 - 2 * 1.28, rel=1e-5)
    _, [slope, *_] = outcome([math.log(2.9)] * 3, batch, dual_clip=2.0)
    assert slope == 0
    _, [_, unbounded, _] = outcome(moves, batch, dual_clip=None)
    assert unbounded == pytest.approx(2e4, rel=1e-3)


@pytest.mark.parametrize("name", ["ppo", "importance_sampling"])
@pytest.mark.parametrize(
    ("correction", "slopes"),
    [  # ratios 0.5 and 4 in one row, whose product is 2; 1.2 in the other; advantages -1
        ("token_truncate", [0.5, 2.5, 1.2]),
        ("token_mask", [0.5, 0.0, 1.2]),
        ("sequence_truncate", [0.5 * 1.0, 4.0 * 1.0, 1.2]),
        ("sequence_mask", [0.5, 4.0, 1.2]),
    ],
)
def test_a_correction_bounds_the_weight_of_tokens_or_rows(
    name: str, correction: str, slopes: list[float]
) -> None:
    settings: dict[str, Any] = {"clip_low": 0.9, "dual_clip": 100} if name == "ppo" else {}
    batch = batch_of([-1.0, -1.0, -1.0], rows=[0, 0, 1])
    moves = [math.log(r) for r in (0.5, 4.0, 1.2)]
    _, found = outcome(
        moves, batch, name=name, correction=correction, correction_max=2.5, **settings
    )
    assert found == pytest.approx(slopes, rel=1e-5)
    if "sequence" in correction:  # the product is beyond a bound of 1.5
        _, found = outcome(
            moves, batch, name=name, correction=correction, correction_max=1.5, **settings
        )
        factor = 1.5 / 2 if "truncate" in correction else 0.0
        assert found == pytest.approx([0.5 * factor, 4 * factor, 1.2], rel=1e-5)


def test_a_mask_has_a_lower_bound_too() -> None:
    settings: dict[str, Any] = {"correction": "token_mask", "correction_min": 0.5}
    moves = [math.log(r) for r in (0.4, 0.6)]
    _, found = outcome(moves, batch_of([1.0, 1.0]), name="importance_sampling", **settings)
    assert found == pytest.approx([0.0, -0.6])


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "importance_sampling"])
def test_ratios_to_recomputed_probabilities_leave_the_sampler_to_the_correction(name: str) -> None:
    # The trainer found the tokens e^0.1 and e^2 times likelier than the sampler did, before the
    # update, and e^0.0001 times likelier again after it.
    old_N = torch.tensor([Q + 0.1, Q + 2.0])
    batch = replace(batch_of([1.0, 1.0], rows=[0, 1]), old_N=old_N)
    moves, r = [0.1001, 2.0001], math.exp(0.0001)
    settings: dict[str, Any] = {"name": name, "old_logprobs": "recomputed"}
    assert outcome(moves, batch, **settings)[1] == pytest.approx([-r, -r], rel=1e-4)
    settings |= {"correction": "token_truncate", "correction_max": 3.0}
    expected = [-r * math.exp(0.1), -r * 3.0]
    assert outcome(moves, batch, **settings)[1] == pytest.approx(expected, rel=1e-4)
    settings |= {"correction": "sequence_mask"}
    assert outcome(moves, batch, **settings)[1] == pytest.approx([expected[0], 0.0], rel=1e-4)


def test_the_only_update_of_a_step_has_ratio_one_to_recomputed_probabilities() -> None:
    _, found = outcome([3.0], batch_of([2.0]), old_logprobs="recomputed")
    assert found == [pytest.approx(-2.0)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("ppo", (0.8, 1.28)), ("gspo", (1 - 3e-4, 1 + 4e-4)), ("cispo", (0.0, 5.0))],
)
def test_the_clip_range_depends_on_the_loss(name: str, expected: tuple[float, float]) -> None:
    assert LossConfig(name=name).clip_range == pytest.approx(expected)
    own = LossConfig(name=name, clip_low=0.5, clip_high=0.25)
    assert own.clip_range == (0.5, 1.25)


def twice(logp_N: Tensor, ratio_N: Tensor, batch: Batch, config: LossConfig) -> Tensor:
    return -2 * batch.advantage_N * logp_N


def test_a_loss_of_ones_own_replaces_ours() -> None:
    logp_N = torch.tensor([Q, Q], requires_grad=True)
    batch = batch_of([1.0, 3.0], weights=[1.0, 0.5])
    scores = PolicyScores(logp_N, torch.zeros(2))
    config = LossConfig(name="my.py:twice")
    value = compute_total_loss(scores, torch.ones(2), None, batch, config, twice)
    assert torch.autograd.grad(value, logp_N)[0].tolist() == [-2.0, -3.0]


@pytest.mark.parametrize("wrong", [torch.zeros(()), torch.zeros(3), 1.0, None])
def test_a_loss_of_another_shape_is_refused_by_name(wrong: object) -> None:
    scores = PolicyScores(torch.zeros(2), torch.zeros(2))
    config = LossConfig(name="my.py:wrong")
    with pytest.raises(ConfigError, match=r"the loss 'my.py:wrong' returned .* shape \(2,\)"):
        compute_total_loss(scores, torch.ones(2), None, batch_of([1, 1]), config, lambda *_: wrong)  # type: ignore[return-value]


def test_the_divergence_is_zero_for_equal_policies_and_else_positive() -> None:
    gap_N = torch.tensor([0.0, 0.5, -0.5])
    found = estimate_kl(torch.zeros(3), gap_N).tolist()
    assert found == [0.0, *(pytest.approx(math.exp(g) - g - 1) for g in (0.5, -0.5))]


def test_the_penalty_pulls_towards_the_reference() -> None:
    # The reference finds the token e^0.3 times likelier: minimizing raises it.
    value, [slope] = outcome([0.0], batch_of([0.0], weights=[0.5]), reference=[Q + 0.3], kl=0.2)
    assert value == pytest.approx(0.5 * 0.2 * (math.exp(0.3) - 0.3 - 1), rel=1e-4)
    assert slope == pytest.approx(0.5 * 0.2 * (1 - math.exp(0.3)))


def test_the_bonus_is_entropy_by_weight() -> None:
    batch = batch_of([0.0, 0.0], weights=[0.5, 0.25])
    scores = PolicyScores(torch.zeros(2, requires_grad=True), torch.tensor([2.0, 1.0]))
    config = LossConfig(entropy=0.1)
    value = compute_total_loss(scores, torch.ones(2), None, batch, config).item()
    assert value == pytest.approx(-0.1 * (0.5 * 2.0 + 0.25 * 1.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "dro", "correction": "token_mask"}, "correction has no meaning for 'dro'"),
        ({"name": "cross_entropy", "clip_low": 0.1}, "clip_low has no meaning"),
        ({"name": "cispo", "dual_clip": 2}, "dual_clip has no meaning"),
        ({"name": "ppo", "beta": 2}, "beta has no meaning"),
        ({"correction_max": 2}, "need a correction"),
        (
            {"correction": "token_truncate", "correction_min": 0.5},
            "correction_min needs correction",
        ),
        ({"name": "gspo", "correction": "token_truncate"}, "bounds its own ratio"),
        ({"name": "pppo"}, "unknown loss 'pppo': choose among ppo, "),
    ],
)
def test_a_key_that_would_do_nothing_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LossConfig.model_validate(settings)


@pytest.mark.parametrize("settings", [{"normalize": "constant"}, {"tokens_per_rollout": 5}])
def test_a_constant_comes_with_its_normalization(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="must be set together"):
        LossConfig.model_validate(settings)


def test_ratios_have_no_gradient_where_they_would_overflow() -> None:
    logp_N = torch.tensor([100.0], requires_grad=True)
    ratio_N: Tensor = compute_ratios(logp_N, batch_of([1.0]), LossConfig())
    assert ratio_N.isfinite().all()


@pytest.mark.parametrize("ratio", [1.5, 5.0])
def test_a_correction_below_the_clip_leaves_the_clip_in_place(ratio: float) -> None:
    settings: dict[str, Any] = {
        "correction": "token_truncate",
        "correction_max": 1.2,
        "dual_clip": 10,
    }
    _, slopes = outcome([math.log(ratio)], batch_of([1.0]), **settings)
    assert slopes == [0.0]
    _, slopes = outcome([math.log(ratio)], batch_of([-1.0]), **settings)
    assert slopes == pytest.approx([1.2])
