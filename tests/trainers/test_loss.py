import pytest
import torch

from whet.config import LossConfig
from whet.trainers.loss import LOSSES

CLIP = LossConfig(clip_low=0.2, clip_high=0.28)


def gradient(name: str, ratio: float, advantage: float, weight: float = 0.5) -> float:
    ratio_N = torch.tensor([ratio], requires_grad=True)
    numbers = torch.tensor([advantage]), torch.tensor([weight])
    LOSSES[name](ratio_N, *numbers, CLIP).backward()
    assert ratio_N.grad is not None
    return ratio_N.grad.item()


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_the_gradient_is_minus_advantage_times_weight(
    name: str, advantage: float
) -> None:
    assert gradient(name, 1.0, advantage) == pytest.approx(-advantage * 0.5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [
        (1.27, 1.0, True),
        (1.29, 1.0, False),  # likelier already: enough
        (0.5, 1.0, True),  # good but rarer: bring it back
        (0.81, -1.0, True),
        (0.79, -1.0, False),  # rarer already: enough
        (1.5, -1.0, True),  # bad but likelier: push it down
    ],
)
def test_ppo_stops_beyond_the_clip_in_the_direction_it_pushed(
    ratio: float, advantage: float, moves: bool
) -> None:
    assert gradient("ppo", ratio, advantage) == (pytest.approx(-advantage * 0.5) if moves else 0.0)


@pytest.mark.parametrize("ratio", [0.1, 1.0, 9.0])
def test_importance_sampling_never_stops(ratio: float) -> None:
    assert gradient("importance_sampling", ratio, 1.0) == pytest.approx(-0.5)


def test_losses_are_sums() -> None:
    one_N, advantage_N, weight_N = torch.ones(3), torch.tensor([1.0, 2.0, -4.0]), torch.ones(3)
    for loss in LOSSES.values():
        assert loss(one_N, advantage_N, weight_N, CLIP).item() == pytest.approx(1.0)
