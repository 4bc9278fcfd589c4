"""One client trains while others sample, score and begin runs: nobody notices.

On a GPU every new number of rows makes an engine record a graph, with all the others at work.
"""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import tinker
from tinker import types

from support.servers.tinker_serving import MARKS, make_datum

pytestmark = MARKS

ROUNDS = 6
TOKENS = [5, 17, 42, 99, 120, 7]
DATA = [
    make_datum(
        types.ModelInput.from_ints([*TOKENS[:-1], index]),
        {"target_tokens": [*TOKENS[1:], 3], "weights": [1.0] * 6},
    )
    for index in range(20)
]


def train(client: tinker.TrainingClient) -> float:
    for _ in range(ROUNDS):
        client.forward_backward(DATA, "cross_entropy").result(60)
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result(60)
    return client.forward(DATA, "cross_entropy").result(60).metrics["loss:sum"]


def sample(client: tinker.SamplingClient, first: int) -> None:
    for index in range(ROUNDS):
        prompt = types.ModelInput.from_ints([*TOKENS, first + index])
        params = types.SamplingParams(max_tokens=4, stop=[])
        found = client.sample(prompt, first + 4 * index, params).result(60)
        assert len(found.sequences) == first + 4 * index
        for sequence in found.sequences:
            assert all(math.isfinite(logprob) for logprob in sequence.logprobs or [math.nan])


def score(client: tinker.SamplingClient) -> None:
    params = types.SamplingParams(max_tokens=1)
    for index in range(ROUNDS):
        prompt = types.ModelInput.from_ints([*TOKENS, *range(3, 4 + index)])
        found = client.sample(prompt, 1, params, prompt_alt_tokens_k=2).result(60)
        assert found.prompt_alt_tokens is not None


def test_everything_at_once(service: tinker.ServiceClient) -> None:
    def begin(seed: int) -> tinker.TrainingClient:
        return service.create_lora_training_client(base_model="tiny", rank=8, seed=seed)

    alone = train(begin(1))
    base = service.create_sampling_client(base_model="tiny")
    adapted = begin(2).save_weights_and_get_sampling_client()
    start = threading.Barrier(7, timeout=60)

    def together(work: Callable[[], float | None]) -> Callable[[], float | None]:
        def waiting() -> float | None:
            start.wait()
            return work()

        return waiting

    with ThreadPoolExecutor(7) as pool:
        trained = [pool.submit(together(lambda: train(begin(1)))) for _ in range(2)]
        others = [
            pool.submit(together(lambda: sample(base, 1))),
            pool.submit(together(lambda: sample(adapted, 2))),
            pool.submit(together(lambda: sample(adapted, 3))),
            pool.submit(together(lambda: score(base))),
            pool.submit(together(lambda: score(adapted))),
        ]
        for future in others:
            future.result(120)
        for future in trained:
            assert future.result(120) == pytest.approx(alone, rel=1e-4)
