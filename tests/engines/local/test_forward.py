"""Engines of one GPU record graphs while other threads are at work. Needs a GPU."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch

from whet.config import LocalTrainerConfig
from whet.engines.local.forward import Forward, build_forward
from whet.engines.scorer import LocalScorer, ScoreRequest
from whet.models.huggingface import LocalPolicy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

SHAPES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def test_concurrent_graph_captures_do_not_disturb_other_threads(tiny_folder: Path) -> None:
    config = LocalTrainerConfig(weights="full", precision="fp32")
    base = LocalPolicy(tiny_folder, config, device="cuda", seed=0)
    lora = config.model_copy(update={"weights": "lora"})

    def adapted() -> LocalPolicy:
        return LocalPolicy(tiny_folder, lora, device="cuda", seed=0, base=base)

    forwards = [build_forward(adapted(), 8192) for _ in range(2)]
    scorer = LocalScorer(base)
    done = threading.Event()

    def make_others() -> None:
        while not done.is_set():
            adapted()

    def draw() -> None:
        while not done.is_set():
            scores = anyio.run(scorer.score, [1, 2, 3, 4], ScoreRequest(samples=2))
            assert scores.sampled[0].shape == (3, 2)

    with ThreadPoolExecutor(4) as pool:
        beside = [pool.submit(make_others), pool.submit(draw)]
        try:
            found = list(pool.map(stepped, forwards))
        finally:
            done.set()
        for future in beside:
            future.result(60)
    # Adapters that were not trained add nothing: both engines say what the model says.
    with torch.inference_mode():
        plain = base.model(input_ids=torch.tensor([[5, 6, 7, 9]], device="cuda")).logits[0, -1]
    for logits in found:
        assert torch.allclose(logits, plain.expand_as(logits), atol=1e-3)


@torch.inference_mode()
def stepped(forward: Forward) -> torch.Tensor:
    """The logits of the last step of many shapes, each of which is recorded."""
    forward.cache.resize(64, 128)
    logits = torch.empty(0)
    for rows in SHAPES:
        forward.cache.active = rows
        forward.cache.clear()
        forward.prefill(list(range(rows)), [[5, 6, 7]] * rows)
        logits = forward.step(np.full(rows, 9)).clone()
    return logits
