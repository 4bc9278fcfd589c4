"""What a scoring model thinks of tokens, beside a plain forward pass over each alone."""

from pathlib import Path
from random import Random

import pytest
import torch

from whet.config import LocalTrainerConfig
from whet.engines.scorer import MAX_BATCH_TOKENS, LocalScorer
from whet.errors import EngineError
from whet.models.huggingface import LocalPolicy

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def policy(tiny_folder: Path) -> LocalPolicy:
    return LocalPolicy(tiny_folder, LocalTrainerConfig(weights="full"), device="cpu", seed=0)


async def test_scores_are_those_of_a_plain_forward_pass(policy: LocalPolicy) -> None:
    dice = Random(0)
    lengths = [5, 1, 200, 17, 200, 64] + [90] * (MAX_BATCH_TOKENS // 90 + 3)
    sequences = [[dice.randrange(policy.vocabulary) for _ in range(n)] for n in lengths]
    found = await LocalScorer(policy).logprobs(sequences)
    assert [len(scores) for scores in found] == [n - 1 for n in lengths]
    for tokens, scores in zip(sequences[:8], found, strict=False):
        with torch.inference_mode():
            logits_TV = policy.model(input_ids=torch.tensor([tokens])).logits[0]
        logp_TV = logits_TV.log_softmax(-1)
        expected = [logp_TV[place, token].item() for place, token in enumerate(tokens[1:])]
        assert list(scores) == pytest.approx(expected, abs=1e-4)


async def test_nothing_to_score_is_nothing(policy: LocalPolicy) -> None:
    assert await LocalScorer(policy).logprobs([]) == []


async def test_a_sequence_longer_than_the_context_is_refused(policy: LocalPolicy) -> None:
    too_long = [0] * (policy.context_length + 1)
    with pytest.raises(EngineError, match=f"the scoring model's context holds {len(too_long) - 1}"):
        await LocalScorer(policy).logprobs([too_long])
