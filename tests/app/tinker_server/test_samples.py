"""Sampling by the real client, against plain forward passes."""

import asyncio
import concurrent.futures
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from support.models.reference import Reference
from support.servers.conformance import shows
from support.servers.tinker_serving import KEY, MARKS, Server, make_datum

pytestmark = MARKS

NEAR = 1e-4
PROMPT = [5, 17, 42, 99, 120]
INPUT = types.ModelInput.from_ints(PROMPT)


@pytest.fixture(scope="module")
def trained(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """A run that is no longer the base model."""
    client = service.create_lora_training_client(base_model="tiny", rank=8, seed=5)
    data = make_datum(
        types.ModelInput.from_ints(PROMPT),
        {"target_tokens": [42, 99, 120, 7, 300], "weights": [0.1] * 5},
    )
    for _ in range(3):
        client.forward_backward([data], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=2e-3)).result()
    return client


@pytest.fixture(scope="module")
def sampler(trained: tinker.TrainingClient) -> tinker.SamplingClient:
    return trained.save_weights_and_get_sampling_client()


@pytest.fixture(scope="module")
def base(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model="tiny")


@pytest.fixture(scope="module")
def plain(model: Path) -> Reference:
    return Reference(model)


def ask(client: tinker.SamplingClient, count: int = 1, **params: Any) -> list[Any]:
    settings = types.SamplingParams.model_validate({"max_tokens": 12, **params})
    return list(client.sample(INPUT, count, settings).result().sequences)


@shows(
    "SamplingClient.sample",
    note="`max_tokens`, `temperature`, `top_k`, `top_p`, `seed`, "
    "`stop`; log-probabilities are of the distribution that was sampled from",
)
def test_sampled_tokens_have_the_logprobs_of_a_forward_pass(
    base: tinker.SamplingClient, plain: Reference
) -> None:
    for one in ask(base, 4):
        whole = [*PROMPT, *one.tokens]
        wanted = plain.after(whole)[len(PROMPT) - 1 :]
        assert one.logprobs == pytest.approx(wanted.tolist(), abs=NEAR)
        assert one.stop_reason == "length" or one.tokens[-1] == 2


def test_samples_of_one_request_differ_and_a_seed_repeats_them(
    base: tinker.SamplingClient,
) -> None:
    def tokens(**params: Any) -> list[tuple[int, ...]]:
        # Hot: at 1 the tiny model gives the same answer twice in one of fifty runs.
        return [tuple(one.tokens) for one in ask(base, 4, temperature=2.0, **params)]

    assert len(set(tokens(stop=[]))) == 4
    assert tokens(seed=7) == tokens(seed=7)
    assert len(set(tokens(seed=7, stop=[]))) == 4
    assert tokens(seed=7) != tokens(seed=99)
    assert tokens() != tokens()


def test_temperature_top_k_and_top_p(base: tinker.SamplingClient, plain: Reference) -> None:
    [greedy] = ask(base, temperature=0.0, stop=[])
    assert greedy.tokens[0] == plain.model(_ids(PROMPT)).logits[0, -1].argmax().item()
    assert ask(base, top_k=1, stop=[])[0].tokens == greedy.tokens
    assert ask(base, top_p=1e-6, stop=[])[0].tokens == greedy.tokens
    [warm] = ask(base, temperature=2.0, max_tokens=1)
    shaped = (plain.model(_ids(PROMPT)).logits[0, -1] / 2).log_softmax(-1)
    assert warm.logprobs[0] == pytest.approx(shaped[warm.tokens[0]].item(), abs=NEAR)


def test_where_it_stops(base: tinker.SamplingClient) -> None:
    [free] = ask(base, seed=1, stop=[], max_tokens=20)
    assert (len(free.tokens), free.stop_reason) == (20, "length")
    stop = free.tokens[5]
    [by_id] = ask(base, seed=1, stop=[stop], max_tokens=20)
    assert by_id.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert by_id.stop_reason == "stop"
    text = str(base.get_tokenizer().decode(free.tokens[:8]))
    [by_text] = ask(base, seed=1, stop=[text[-3:]], max_tokens=20)
    assert by_text.tokens == free.tokens[: len(by_text.tokens)]
    assert text[-3:] in str(base.get_tokenizer().decode(by_text.tokens))
    [by_eos] = ask(base, seed=1, max_tokens=2000)
    assert by_eos.stop_reason == "length" or by_eos.tokens[-1] == 2


@shows("SamplingClient.compute_logprobs")
def test_logprobs_of_a_prompt(base: tinker.SamplingClient, plain: Reference) -> None:
    found = base.compute_logprobs(INPUT).result()
    assert found[0] is None
    assert found[1:] == pytest.approx(plain.after(PROMPT).tolist(), abs=NEAR)


def test_all_that_can_be_asked_of_a_prompt(base: tinker.SamplingClient, plain: Reference) -> None:
    targets = np.array([[3, -1], [4, 5], [6, 7], [8, 9]], np.int64)
    found = base.sample(
        INPUT,
        1,
        types.SamplingParams(max_tokens=2),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
        target_prompt_logprobs=types.TensorData.from_numpy(targets),
        prompt_alt_tokens_k=2,
        prompt_logprobs_last_n=2,
    ).result()
    logp = plain.model(_ids(PROMPT)).logits[0, :-1].log_softmax(-1).detach()
    chosen = found.prompt_logprobs
    assert chosen is not None
    assert chosen[:3] == [None] * 3
    assert chosen[3:] == pytest.approx(plain.after(PROMPT)[2:].tolist(), abs=NEAR)
    tops = found.topk_prompt_logprobs
    assert tops is not None
    assert tops[:3] == [None] * 3
    for place, top in zip((2, 3), tops[3:], strict=True):
        assert top is not None
        values, ids = logp[place].topk(3)
        assert [id for id, _ in top] == ids.tolist()
        assert [value for _, value in top] == pytest.approx(values.tolist(), abs=NEAR)
    scored = found.target_prompt_logprobs
    assert scored is not None
    for place, row in enumerate(np.array(scored.data).reshape(4, 2)):
        for target, value in zip(targets[place], row, strict=True):
            wanted = logp[place][target].item() if target >= 0 else 0.0
            assert value == pytest.approx(wanted, abs=NEAR)
    drawn = found.prompt_alt_tokens
    assert drawn is not None
    ids, values = np.array(drawn.tokens.data), np.array(drawn.logprobs.data)
    wanted = logp[np.repeat(np.arange(4), 2), ids]
    assert values == pytest.approx(wanted.numpy(), abs=NEAR)
    [sequence] = found.sequences
    assert sequence.topk_logprobs_np is not None
    assert sequence.topk_logprobs_np.logprobs.shape == (2, 2)


@shows("TrainingClient.save_weights_and_get_sampling_client")
@shows("TrainingClient.save_weights_for_sampler", "TrainingClient.create_sampling_client")
@shows("ServiceClient.create_sampling_client", note="by base model or path")
def test_samplers_have_the_weights_of_when_they_were_saved(
    service: tinker.ServiceClient,
    trained: tinker.TrainingClient,
    sampler: tinker.SamplingClient,
    base: tinker.SamplingClient,
) -> None:
    data = make_datum(
        types.ModelInput.from_ints(PROMPT[:-1]),
        {"target_tokens": PROMPT[1:], "weights": [1.0] * 4},
    )

    def now() -> list[float]:
        output = trained.forward([data], "cross_entropy").result().loss_fn_outputs[0]
        return list(output["logprobs"].data)

    before = now()
    path = trained.save_weights_for_sampler("here").result().path
    trained.forward_backward([data], "cross_entropy")
    trained.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert now() != pytest.approx(before, abs=NEAR)
    for client in (
        sampler,
        service.create_sampling_client(model_path=path),
        trained.create_sampling_client(path),
    ):
        assert client.compute_logprobs(INPUT).result()[1:] == pytest.approx(before, abs=NEAR)
    latest = trained.save_weights_and_get_sampling_client()
    assert latest.compute_logprobs(INPUT).result()[1:] == pytest.approx(now(), abs=NEAR)
    assert base.compute_logprobs(INPUT).result()[1:] != pytest.approx(before, abs=NEAR)


@shows("SamplingClient.get_base_model", "SamplingClient.get_tokenizer", "RestClient.get_sampler")
def test_a_sampler_says_what_it_is(
    base: tinker.SamplingClient, rest: tinker.RestClient, model: Path
) -> None:
    assert base.get_base_model() == str(model)
    assert base.get_tokenizer().encode("1+1")
    found = rest.get_sampler(base._sampling_session_id).result()
    assert (found.base_model, found.model_path) == (str(model), None)


@shows("SamplingClient.get_sampler_handle", note="for any process")
def test_a_handle_samples_in_another_process(sampler: tinker.SamplingClient) -> None:
    program = (
        "import sys, tinker\n"
        "client = tinker.SamplingClient.from_sampler_handle(sys.argv[1], api_key=sys.argv[2])\n"
        f"prompt = tinker.ModelInput.from_ints({PROMPT})\n"
        "print([x for x in client.compute_logprobs(prompt).result() if x])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, sampler.get_sampler_handle(), KEY],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    local = [logprob for logprob in sampler.compute_logprobs(INPUT).result() if logprob]
    there = [float(x) for x in done.stdout.strip("[]\n ").split(",")]
    assert there == pytest.approx(local, abs=1e-6)


def test_200_requests_at_once(sampler: tinker.SamplingClient, base: tinker.SamplingClient) -> None:
    params = types.SamplingParams(max_tokens=20)
    futures = [
        (base if index % 2 else sampler).sample(
            types.ModelInput.from_ints([5, 17, 40 + index]), 1, params
        )
        for index in range(200)
    ]
    done, late = concurrent.futures.wait(futures, timeout=120)
    assert not late
    for future in done:
        [sequence] = future.result().sequences
        assert 1 <= len(sequence.tokens) <= 20
        assert all(math.isfinite(logprob) for logprob in sequence.logprobs or ())


def _ids(tokens: list[int]) -> Any:
    import torch

    return torch.tensor([tokens])


def test_requests_with_neighboring_seeds_have_no_sample_in_common(
    base: tinker.SamplingClient,
) -> None:
    samples = [
        {tuple(one.tokens) for one in ask(base, 4, temperature=2.0, seed=seed, stop=[])}
        for seed in (0, 1, 2)
    ]
    assert not samples[0] & samples[1]
    assert not samples[1] & samples[2]


def test_a_checkpoint_saved_again_is_sampled_from_as_it_is_now(
    service: tinker.ServiceClient,
) -> None:
    client = service.create_lora_training_client(base_model="tiny", rank=4, seed=1)
    data = make_datum(INPUT, {"target_tokens": [42, 99, 120, 7, 300], "weights": [1.0] * 5})
    scores: list[list[float]] = []
    for _ in range(3):
        path = client.save_state("last", overwrite=True).result().path
        found = service.create_sampling_client(model_path=path).compute_logprobs(INPUT).result()
        scores.append([score for score in found if score is not None])
        client.forward_backward([data], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert scores[0] != scores[1] != scores[2]


def test_a_prompt_as_long_as_the_context_is_scored(base: tinker.SamplingClient) -> None:
    prompt = types.ModelInput.from_ints([5, 17] * 512)
    found = base.compute_logprobs(prompt).result()
    assert len([score for score in found if score is not None]) == 1023


def test_targets_may_be_sparse(base: tinker.SamplingClient) -> None:
    dense = np.full((4, 3), -1)
    dense[1, 2], dense[3, 0] = 42, 7
    sparse = types.TensorData(
        data=[42, 7],
        dtype="int64",
        shape=[4, 3],
        sparse_crow_indices=[0, 0, 1, 1, 2],
        sparse_col_indices=[2, 0],
    )
    whole = types.TensorData(data=dense.ravel().tolist(), dtype="int64", shape=[4, 3])
    one = types.SamplingParams(max_tokens=1)
    scores = [
        base.sample(INPUT, 1, one, target_prompt_logprobs=target).result().target_prompt_logprobs
        for target in (sparse, whole)
    ]
    found, expected = scores
    assert found is not None
    assert expected is not None
    assert found.sparse_col_indices == [2, 0]
    assert found.sparse_crow_indices == [0, 0, 1, 1, 2]
    assert found.data == pytest.approx([expected.data[5], expected.data[9]])


def test_an_empty_stop_string_is_refused(base: tinker.SamplingClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match="stop has an empty string"):
        ask(base, stop=[""])


def test_a_canceled_sample_ends_at_once(server: Server) -> None:
    async def cancel() -> float:
        client = server.client()
        sampler = await client.create_sampling_client_async(base_model="tiny")
        long = types.SamplingParams(max_tokens=1000, stop=[])
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(sampler.sample_async(types.ModelInput.from_ints([5, n]), 8, long))
                for n in range(3, 23)
            ]
            await asyncio.sleep(2)
            for task in running:
                task.cancel()
        began = time.monotonic()
        short = types.SamplingParams(max_tokens=8, stop=[])
        await sampler.sample_async(INPUT, 1, short)
        return time.monotonic() - began

    assert asyncio.run(cancel()) < 15
