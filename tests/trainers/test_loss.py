"""Every loss by hand: the arithmetic is in the tests."""

import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from whet.config import LossConfig
from whet.policies.distribution import Shaping
from whet.trainers.batch import Batch
from whet.trainers.loss import LOSSES, divergence, ratios, total
from whet.trainers.scoring import Scores

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
        shaping=Shaping.of([(1, 1, 0)] * n, "cpu"),
    )


def outcome(
    log_ratios: list[float],
    batch: Batch,
    *,
    reference: list[float] | None = None,
    **settings: object,
) -> tuple[float, list[float]]:
    """The loss of tokens whose log-probability moved by this much, and its slope in each."""
    logp_N = (torch.tensor(log_ratios) + Q).requires_grad_()
    config = LossConfig.model_validate(settings)
    scores = Scores(logp_N, torch.zeros(len(log_ratios)))
    reference_N = torch.tensor(reference) if reference else None
    value = total(scores, ratios(logp_N, batch, config), reference_N, batch, config)
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
    found = outcome([math.log(ratio)], batch_of([advantage]), name=name)
    assert found == (pytest.approx(value), [pytest.approx(slope, abs=1e-6)])


def test_gspo_has_one_ratio_for_a_row_the_geometric_mean_of_its_tokens() -> None:
    # Row 0: (0.3 + 0.1 - 0.1) / 3 = 0.1, and e^0.1 is inside the clip. Row 1: e^0.5 is outside.
    batch = batch_of([2.0, 2.0, 2.0, 1.0], rows=[0, 0, 0, 1])
    value, slopes = outcome([0.3, 0.1, -0.1, 0.5], batch, name="gspo")
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
    value, [slope] = outcome([move], batch_of([advantage]), name="cispo")
    assert value == pytest.approx(-weight * advantage * (Q + move), rel=1e-5)
    assert slope == pytest.approx(-weight * advantage, rel=1e-5)


def test_dro_is_held_near_the_sampler_by_a_square() -> None:
    value, [slope] = outcome([0.4], batch_of([3.0]), name="dro", beta=0.5)
    assert value == pytest.approx(-3 * (Q + 0.4) + 0.5 / 2 * 0.4**2)
    assert slope == pytest.approx(-3 + 0.5 * 0.4)


def test_cross_entropy_asks_nobody_how_likely_it_was() -> None:
    value, slopes = outcome([0.7, -3.0], batch_of([1.0, 0.5]), name="cross_entropy")
    assert value == pytest.approx(-(Q + 0.7) - 0.5 * (Q - 3.0))
    assert slopes == [-1.0, -0.5]


@pytest.mark.parametrize(
    ("name", "move", "advantage", "slope"),
    [
        ("importance_sampling", 3.0, 1.0, -2.0),  # not e^3
        ("importance_sampling", 0.5, 1.0, -math.exp(0.5)),
        ("ppo", 3.0, -1.0, 2.0),
        ("ppo", 3.0, 1.0, 0.0),  # clipped before
        ("ppo", 0.1, -1.0, math.exp(0.1)),
        ("gspo", 3.0, -1.0, 2.0),
    ],
)
def test_a_ratio_weighs_no_more_than_its_limit(
    name: str, move: float, advantage: float, slope: float
) -> None:
    _, [found] = outcome([move], batch_of([advantage]), name=name, max_ratio=2.0)
    assert found == pytest.approx(slope, rel=1e-5)


def test_the_divergence_is_zero_at_home_and_positive_elsewhere() -> None:
    gap_N = torch.tensor([0.0, 0.5, -0.5])
    found = divergence(torch.zeros(3), gap_N).tolist()
    assert found == [0.0, *(pytest.approx(math.exp(g) - g - 1) for g in (0.5, -0.5))]


def test_the_penalty_pulls_towards_the_reference() -> None:
    # The reference finds the token e^0.3 times likelier: minimising raises it.
    value, [slope] = outcome([0.0], batch_of([0.0], weights=[0.5]), reference=[Q + 0.3], kl=0.2)
    assert value == pytest.approx(0.5 * 0.2 * (math.exp(0.3) - 0.3 - 1), rel=1e-4)
    assert slope == pytest.approx(0.5 * 0.2 * (1 - math.exp(0.3)))


def test_the_bonus_is_entropy_by_weight() -> None:
    batch = batch_of([0.0, 0.0], weights=[0.5, 0.25])
    scores = Scores(torch.zeros(2, requires_grad=True), torch.tensor([2.0, 1.0]))
    config = LossConfig(entropy=0.1)
    value = total(scores, torch.ones(2), None, batch, config).item()
    assert value == pytest.approx(-0.1 * (0.5 * 2.0 + 0.25 * 1.0))


@pytest.mark.parametrize("name", ["cispo", "dro", "cross_entropy"])
def test_a_limit_that_would_do_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="max_ratio has no meaning"):
        LossConfig.model_validate({"name": name, "max_ratio": 2.0})


@pytest.mark.parametrize("settings", [{"normalise": "constant"}, {"tokens_per_rollout": 5}])
def test_a_constant_comes_with_its_normalisation(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="given together"):
        LossConfig.model_validate(settings)


def test_ratios_have_no_gradient_where_they_would_overflow() -> None:
    logp_N = torch.tensor([100.0], requires_grad=True)
    ratio_N: Tensor = ratios(logp_N, batch_of([1.0]), LossConfig())
    assert ratio_N.isfinite().all()
