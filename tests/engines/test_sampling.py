import math
from random import Random

import pytest
import torch

from whet.engines.request import Request
from whet.engines.sampling import draw
from whet.errors import EngineError
from whet.policies.distribution import Shaping, log_probs
from whet.types import Sampling


def request(seed: int = 0, **sampling: object) -> Request:
    return Request(
        tokens=[0],
        sampling=Sampling.model_validate(sampling),
        limit=9,
        stream=False,
        random=Random(seed),
    )


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
def test_tokens_come_as_often_as_their_probability_says(sampling: dict[str, float]) -> None:
    rows, vocabulary = 30_000, 60
    logits_V = 1.5 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(0))
    requests = [request(seed, **sampling) for seed in range(rows)]
    drawn = draw(logits_V.expand(rows, -1), requests)
    chosen = requests[0].sampling
    shaping = Shaping.of([(chosen.temperature, chosen.top_p, chosen.top_k)], "cpu")
    p_V = log_probs(logits_V[None], shaping)[0].double().exp()
    count_V = torch.tensor([d.token for d in drawn]).bincount(minlength=vocabulary)
    assert count_V[p_V == 0].sum() == 0, "a token that was cut off was sampled"
    possible = p_V > 0
    expected = rows * p_V[possible]
    chi_square = ((count_V[possible] - expected) ** 2 / expected).sum().item()
    freedom = int(possible.sum()) - 1
    assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)
    for one in drawn[:50]:
        assert one.logprob == pytest.approx(p_V[one.token].log().item(), abs=1e-5)


class Always(Random):
    """Random numbers that are always the same."""

    def __init__(self, point: float) -> None:
        super().__init__()
        self._point = point

    def random(self) -> float:
        return self._point


@pytest.mark.parametrize("point", [0.0, 0.5, math.nextafter(1.0, 0.0)])
def test_the_ends_of_the_unit_interval_pick_tokens_that_can_be_sampled(point: float) -> None:
    logits_V = torch.full((1000,), -math.inf)
    logits_V[[3, 500, 700]] = torch.tensor([0.3, 0.1, 0.2])
    one = request()
    one.random = Always(point)
    [drawn] = draw(logits_V[None], [one])
    assert drawn.token == {0.0: 3, 0.5: 500}.get(point, 700)


def test_rows_have_their_own_settings() -> None:
    logits_BV = torch.arange(10.0).log().expand(4, -1)
    asked = [
        request(temperature=0, top_logprobs=2),
        request(top_k=1),
        request(temperature=5.0),
        request(top_logprobs=20),
    ]
    greedy, narrow, hot, wide = draw(logits_BV, asked)
    assert greedy.token == narrow.token == 9
    assert greedy.logprob == pytest.approx(math.log(9 / 45))
    assert narrow.logprob == pytest.approx(0)
    assert greedy.top == (
        (9, pytest.approx(math.log(9 / 45))),
        (8, pytest.approx(math.log(8 / 45))),
    )
    assert narrow.top == hot.top == ()
    assert len(wide.top) == 9, "all that have a probability"


def test_logits_that_are_no_numbers_are_an_error() -> None:
    logits_BV = torch.zeros(2, 10)
    logits_BV[1, 4] = float("nan")
    with pytest.raises(EngineError, match="not finite"):
        draw(logits_BV, [request(), request()])
