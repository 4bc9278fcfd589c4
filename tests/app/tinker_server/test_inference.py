"""The clients of OpenAI and Anthropic against the server: base models and checkpoints as models."""

import json
from collections.abc import Generator
from typing import Any

import anthropic
import openai
import pytest
import tinker
from openai.types.chat import ChatCompletion
from tinker import types

from support.servers.tinker_serving import KEY, MARKS, Server, make_datum

pytestmark = MARKS

NEAR = 1e-4
QUESTION: list[Any] = [{"role": "user", "content": "1+1"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def client(server: Server) -> Generator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/oai/api/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def trained(service: tinker.ServiceClient) -> tinker.TrainingClient:
    training = service.create_lora_training_client(base_model="tiny", rank=4, seed=1)
    train(training)
    return training


def train(training: tinker.TrainingClient) -> None:
    tokens = [5, 17, 42, 99]
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 3}
    data = make_datum(types.ModelInput.from_ints(tokens[:-1]), inputs)
    for _ in range(3):
        training.forward_backward([data], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=2e-2)).result()


def read_tokens(reply: ChatCompletion) -> tuple[list[int], list[int], list[float]]:
    """The ids of prompt and answer, and the log-probabilities of the answer."""
    [choice] = reply.choices
    found: Any = choice
    assert found.logprobs is not None
    logprobs = [token.logprob for token in found.logprobs.content]
    prompt: list[int] = (reply.model_extra or {})["prompt_token_ids"]
    return prompt, found.token_ids, logprobs


def complete(client: openai.OpenAI, model: str) -> tuple[list[int], list[int], list[float]]:
    extra = {"return_token_ids": True}
    reply = client.chat.completions.create(
        model=model, messages=QUESTION, logprobs=True, extra_body=extra, **GREEDY
    )
    assert reply.model == model
    return read_tokens(reply)


def assert_sampled_by(sampler: tinker.SamplingClient, found: tuple[Any, Any, Any]) -> None:
    prompt, tokens, logprobs = found
    whole = types.ModelInput.from_ints([*prompt, *tokens])
    scores = sampler.compute_logprobs(whole).result()[len(prompt) :]
    assert scores == pytest.approx(logprobs, abs=NEAR)


def test_a_checkpoint_and_its_base_model_answer_each_with_their_own_weights(
    client: openai.OpenAI, service: tinker.ServiceClient, trained: tinker.TrainingClient
) -> None:
    path = trained.save_weights_for_sampler("chat").result().path
    base = complete(client, "tiny")
    assert_sampled_by(service.create_sampling_client(base_model="tiny"), base)
    tuned = complete(client, path)
    assert_sampled_by(service.create_sampling_client(model_path=path), tuned)
    assert tuned[2] != pytest.approx(base[2], abs=1e-2)
    assert complete(client, f"tiny;{path}") == tuned
    assert path in {model.id for model in client.models.list()}


def test_a_state_saved_again_is_sampled_as_it_is_now(
    client: openai.OpenAI, service: tinker.ServiceClient
) -> None:
    training = service.create_lora_training_client(base_model="tiny", rank=2, seed=0)
    path = training.save_state("last").result().path
    before = complete(client, path)
    train(training)
    training.save_state("last", overwrite=True).result()
    after = complete(client, path)
    assert after[2] != pytest.approx(before[2], abs=1e-2)
    assert_sampled_by(service.create_sampling_client(model_path=path), after)


def test_streams_and_plain_completions(
    client: openai.OpenAI, trained: tinker.TrainingClient
) -> None:
    path = trained.save_weights_for_sampler("stream").result().path
    whole = client.chat.completions.create(model=path, messages=QUESTION, **GREEDY)
    stream = client.chat.completions.create(model=path, messages=QUESTION, stream=True, **GREEDY)
    parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(parts) == whole.choices[0].message.content
    text = client.completions.create(model=path, prompt="1+1", **GREEDY)
    assert text.choices[0].finish_reason in ("stop", "length")


def test_the_client_of_anthropic(server: Server, trained: tinker.TrainingClient) -> None:
    path = trained.save_weights_for_sampler("message").result().path
    address = f"{server.url}/anthropic/api"
    with anthropic.Anthropic(base_url=address, api_key=KEY, max_retries=0) as client:
        message = client.messages.create(model=path, messages=QUESTION, max_tokens=6)
        counted = client.messages.count_tokens(model=path, messages=QUESTION)
    assert message.model == path
    assert message.usage.input_tokens == counted.input_tokens


def test_an_answer_keeps_to_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    format: Any = {
        "type": "json_schema",
        "json_schema": {"name": "number", "schema": schema | {"additionalProperties": False}},
    }
    reply = client.chat.completions.create(
        model="tiny", messages=QUESTION, response_format=format, temperature=0, max_tokens=64
    )
    assert json.loads(reply.choices[0].message.content or "") in ({"n": 1}, {"n": 2})


def test_unknown_models_and_keys_are_refused(
    server: Server, client: openai.OpenAI, trained: tinker.TrainingClient
) -> None:
    exported = trained.save_weights_external("exported").result().path
    for model, error in (
        ("other", "unknown model 'other': this server serves"),
        ("tinker://nowhere/sampler_weights/x", "unknown checkpoint"),
        ("tiny;x", "BASE;PATH"),
        (exported, "exported weights"),
    ):
        with pytest.raises(openai.APIStatusError, match=error) as refused:
            client.chat.completions.create(model=model, messages=QUESTION)
        assert refused.value.status_code in (400, 404)
    with (
        openai.OpenAI(base_url=client.base_url, api_key="tml-another", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    for body in (b"{", b"[]", b'{"model": 1}'):
        with pytest.raises(openai.BadRequestError, match=r"not JSON|missing model"):
            client.post("/chat/completions", cast_to=object, content=body)


def test_headers_that_name_an_attempt_are_not_read(client: openai.OpenAI) -> None:
    headers = {"trace_id": "an-attempt", "baggage": "whet.attempt=another"}
    reply = client.chat.completions.create(
        model="tiny", messages=QUESTION, extra_headers=headers, **GREEDY
    )
    assert reply.choices
