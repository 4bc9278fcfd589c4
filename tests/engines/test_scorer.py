"""Scores of tokens, against a plain forward pass over each sequence alone."""

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from whet.config import LocalTrainerConfig
from whet.engines import scorer
from whet.engines.scorer import MAX_BATCH_TOKENS, LocalScorer, ScoreRequest
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


async def test_chunks_of_logits_have_the_scores_of_all_at_once(
    policy: LocalPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [Random(1).randrange(policy.vocabulary) for _ in range(23)]
    request = ScoreRequest(top=3, targets=np.arange(44).reshape(22, 2), samples=2, temperature=0)
    whole = await LocalScorer(policy).score(tokens, request)
    [row] = await LocalScorer(policy).logprobs([tokens])
    assert list(row) == pytest.approx(whole.chosen.tolist(), abs=1e-5)
    monkeypatch.setattr(scorer, "CHUNK_LOGITS", 5 * policy.vocabulary)
    parts = await LocalScorer(policy).score(tokens, request)
    assert parts.top[0].tolist() == whole.top[0].tolist()
    assert parts.sampled[0].tolist() == whole.sampled[0].tolist()
    pairs = [
        (parts.chosen, whole.chosen),
        (parts.targets, whole.targets),
        (parts.top[1], whole.top[1]),
        (parts.sampled[1], whole.sampled[1]),
    ]
    for part, expected in pairs:
        np.testing.assert_allclose(part, expected, atol=1e-5)
    one = await LocalScorer(policy).score(tokens[:1], ScoreRequest(top=3, samples=2))
    assert (one.chosen.shape, one.top[0].shape, one.targets.shape) == ((0,), (0, 3), (0, 0))


async def test_nothing_to_score_is_nothing(policy: LocalPolicy) -> None:
    assert await LocalScorer(policy).logprobs([]) == []


async def test_a_sequence_longer_than_the_context_is_refused(policy: LocalPolicy) -> None:
    too_long = [0] * (policy.context_length + 1)
    with pytest.raises(EngineError, match=f"the scoring model's context holds {len(too_long) - 1}"):
        await LocalScorer(policy).logprobs([too_long])
