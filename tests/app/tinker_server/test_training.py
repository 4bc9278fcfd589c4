"""Training by the real client: each number against plain torch."""

import asyncio
import json
import math
import random
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pyrage
import pytest
import tinker
import torch
from tinker import types

from support.models.reference import Reference
from support.servers.conformance import shows
from support.servers.tinker_serving import MARKS, Server

pytestmark = MARKS

NEAR = 1e-4
CLIPPED = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": CLIPPED,
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
    "gspo": CLIPPED,
}
Example = tuple[list[int], dict[str, Any]]
age: Any = pyrage  # an extension module without types


def examples(loss: str, count: int = 5) -> list[Example]:
    """Sequences that share a beginning, of different lengths."""
    dice = random.Random(loss)
    made: list[Example] = []
    for index in range(count):
        tokens = [5, 17, 42, 99] + [dice.randrange(3, 1000) for _ in range(3 + index)]
        inner, targets = tokens[:-1], tokens[1:]
        n = len(inner)
        inputs: dict[str, Any] = {"target_tokens": targets}
        if loss == "cross_entropy":
            inputs["weights"] = [dice.random() for _ in range(n)]
        else:
            inputs["logprobs"] = [-dice.uniform(4, 12) for _ in range(n)]
            inputs["advantages"] = [0.0] * 3 + [dice.gauss(0, 1) for _ in range(n - 3)]
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = [0.0] * 3 + [1.0] * (n - 3)
        made.append((inner, inputs))
    return made


def datum(example: Example) -> types.Datum:
    tokens, inputs = example
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def expected(
    reference: Reference, loss: str, data: list[Example]
) -> tuple[list[Any], torch.Tensor]:
    logprobs = [reference.logprobs(tokens, inputs["target_tokens"]) for tokens, inputs in data]
    parts = [
        reference.loss(loss, lp, inputs, LOSSES[loss])
        for lp, (_, inputs) in zip(logprobs, data, strict=True)
    ]
    return logprobs, torch.stack(parts).sum()


def close(found: types.ForwardBackwardOutput, logprobs: list[Any], loss: torch.Tensor) -> None:
    assert len(found.loss_fn_outputs) == len(logprobs)
    for output, wanted in zip(found.loss_fn_outputs, logprobs, strict=True):
        shape = output["logprobs"].shape
        assert shape == list(wanted.shape)
        got = np.array(output["logprobs"].data).reshape(shape)
        assert got == pytest.approx(wanted.detach().numpy(), abs=NEAR)
    assert found.metrics["loss:sum"] == pytest.approx(loss.item(), rel=NEAR, abs=NEAR)


@shows("ServiceClient.get_server_capabilities")
def test_it_says_what_it_serves(service: tinker.ServiceClient, model: Path) -> None:
    [found] = service.get_server_capabilities().supported_models
    assert (found.model_name, found.max_context_length) == (str(model), 1024)
    assert found.trainable
    assert found.sampleable


@shows(
    "ServiceClient.create_lora_training_client", note="AdamW; rank 1 to 1024, any seed and layers"
)
@shows("TrainingClient.get_info", "TrainingClient.get_tokenizer")
def test_a_new_run(training: tinker.TrainingClient, model: Path) -> None:
    info = training.get_info()
    assert (info.model_name, info.lora_rank, info.is_lora) == (str(model), 8, True)
    assert training.get_tokenizer().encode("1+1")


@shows(
    "TrainingClient.save_weights_external", note="a PEFT adapter, encrypted with age if requested"
)
@shows("RestClient.get_external_weights_urls")
def test_new_adapters_change_nothing_and_other_tools_load_them(model: Path, adapter: Path) -> None:
    plain, adapted = Reference(model), Reference(model, adapter)
    tokens = [5, 17, 42, 99, 7]
    assert adapted.after(tokens).tolist() == pytest.approx(plain.after(tokens).tolist(), abs=1e-5)


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
def test_a_datum_may_have_clip_thresholds_for_each_token(
    loss: Any, training: tinker.TrainingClient, model: Path, adapter: Path
) -> None:
    data = examples(loss)
    for index, (tokens, inputs) in enumerate(data[1:]):  # the first has those of the loss
        inputs["clip_low_threshold"] = [0.1 * (index + 1)] * len(tokens)
        inputs["clip_high_threshold"] = [1.0 + 0.2 * place for place in range(len(tokens))]
    logprobs, value = expected(Reference(model, adapter), loss, data)
    found = training.forward([datum(one) for one in data], loss, LOSSES[loss]).result()
    close(found, logprobs, value)


def test_an_export_is_encrypted_to_its_recipients_alone(
    training: tinker.TrainingClient, rest: tinker.RestClient, adapter: Path, server: Server
) -> None:
    reader, stranger = (age.x25519.Identity.generate() for _ in range(2))
    recipients = [str(reader.to_public())]
    path = training.save_weights_external("secret", age_encryption_recipients=recipients)
    urls = rest.get_external_weights_urls(path.result().path).result().urls
    assert {name.removesuffix(".age") for name in urls} == {f.name for f in adapter.iterdir()}
    for name, url in urls.items():
        assert name.endswith(".age")
        with urllib.request.urlopen(url) as reply:
            hidden = reply.read()
        plain = (adapter / name.removesuffix(".age")).read_bytes()
        assert age.decrypt(hidden, [reader]) == plain
        with pytest.raises(age.DecryptError):
            age.decrypt(hidden, [stranger])
    kept = {file.name for file in server.folder.glob("tinker/runs/*/external_weights/secret/*")}
    assert kept == {*urls, "checkpoint.json"}, "nothing is left in clear"
    bad = training.save_weights_external("bad", age_encryption_recipients=["age1nobody"])
    with pytest.raises(tinker.RequestFailedError, match="invalid age recipient 'age1nobody'"):
        bad.result()


def test_ratios_are_of_log_probabilities_that_differ_by_at_most_20(
    training: tinker.TrainingClient,
) -> None:
    tokens, inputs = examples("importance_sampling", 1)[0]
    inputs["logprobs"] = [-500.0] * len(tokens)
    inputs["advantages"] = [0.5] * len(tokens)
    found = training.forward_backward([datum((tokens, inputs))], "importance_sampling").result()
    assert found.metrics["loss:sum"] == pytest.approx(-0.5 * math.exp(20) * len(tokens), rel=1e-5)
    params = types.AdamParams(learning_rate=1e-3)
    stepped = training.optim_step(params).result()
    assert (stepped.metrics or {})["grad_norm:mean"] == 0, "no gradient beyond"


@pytest.mark.parametrize("loss", LOSSES)
@shows(
    "TrainingClient.forward",
    "TrainingClient.forward_backward",
    note="`cross_entropy`, `importance_sampling`, `ppo`, `cispo`, `dro`, `gspo`",
)
@shows("TrainingClient.optim_step", note="AdamW")
def test_losses_gradients_and_steps_are_those_of_the_formulas(
    loss: Any, training: tinker.TrainingClient, model: Path, adapter: Path
) -> None:
    reference = Reference(model, adapter)
    data = examples(loss)
    sent = [datum(one) for one in data]
    for settings in (
        {"lr": 1e-2, "clip": 0.5},
        {"lr": 3e-3, "beta1": 0.8, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1},
    ):
        logprobs, value = expected(reference, loss, data)
        close(training.forward(sent, loss, LOSSES[loss]).result(), logprobs, value)
        found = training.forward_backward(sent, loss, LOSSES[loss])
        params = types.AdamParams(
            learning_rate=settings["lr"],
            grad_clip_norm=settings.get("clip", 0.0),
            beta1=settings.get("beta1", 0.9),
            beta2=settings.get("beta2", 0.95),
            eps=settings.get("eps", 1e-12),
            weight_decay=settings.get("weight_decay", 0.0),
        )
        stepped = training.optim_step(params)
        close(found.result(), logprobs, value)
        value.backward()
        norm = reference.step(**settings)
        metrics = stepped.result().metrics
        assert metrics is not None
        assert metrics["grad_norm:mean"] == pytest.approx(norm, rel=1e-3)
    logprobs, value = expected(reference, loss, data)
    close(training.forward(sent, loss, LOSSES[loss]).result(), logprobs, value)


def test_several_targets_for_each_token(
    training: tinker.TrainingClient, model: Path, adapter: Path
) -> None:
    targets = [[17, 3], [42, 4], [99, 5]]
    example = ([5, 17, 42], {"target_tokens": targets, "weights": [[0.9, 0.1]] * 3})
    reference = Reference(model, adapter)
    logprobs, value = expected(reference, "cross_entropy", [example])
    array = types.TensorData.from_numpy
    sent = types.Datum(
        model_input=types.ModelInput.from_ints(example[0]),
        loss_fn_inputs={
            "target_tokens": array(np.array(targets)),
            "weights": array(np.array(example[1]["weights"], np.float32)),
        },
    )
    close(training.forward_backward([sent], "cross_entropy").result(), logprobs, value)


@shows("TrainingClient.forward_backward_custom", note="computed by the client")
def test_a_loss_of_the_clients_own(
    training: tinker.TrainingClient, model: Path, adapter: Path
) -> None:
    def squares(data: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        return sum(((lp + 3) ** 2).sum() for lp in logprobs), {"seen": float(len(data))}

    found = own_loss_is_that_of_the_reference(training, Reference(model, adapter), squares)
    assert found.metrics["seen"] == 5


@shows("ServiceClient.create_custom_loss", note="computed by the client")
def test_a_loss_that_the_client_traced(
    service: tinker.ServiceClient, training: tinker.TrainingClient, model: Path, adapter: Path
) -> None:
    def squares(logprobs: Any, weights: Any) -> tuple[Any, dict[str, Any]]:
        return ((logprobs + 3) ** 2).sum(), {"custom/weights:sum": weights.sum()}

    handle = service.create_custom_loss(squares, {"logprobs": 1, "weights": 1}).result()
    assert handle.loss_id is None, "it was uploaded"
    found = own_loss_is_that_of_the_reference(training, Reference(model, adapter), handle)
    weights = sum(sum(inputs["weights"]) for _, inputs in examples("cross_entropy"))
    assert found.metrics["custom/weights:sum"] == pytest.approx(weights, rel=NEAR)


def own_loss_is_that_of_the_reference(
    training: tinker.TrainingClient, reference: Reference, loss: Any
) -> types.ForwardBackwardOutput:
    data = examples("cross_entropy")
    sent = [datum(one) for one in data]
    logprobs, _ = expected(reference, "cross_entropy", data)
    value = torch.stack([((lp + 3) ** 2).sum() for lp in logprobs]).sum()
    found = training.forward_backward_custom(sent, loss).result()
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    close(found, logprobs, value)
    value.backward()
    assert stepped.metrics is not None
    assert stepped.metrics["grad_norm:mean"] == pytest.approx(reference.step(lr=1e-2), rel=1e-3)
    logprobs, value = expected(reference, "cross_entropy", data)
    close(training.forward(sent, "cross_entropy").result(), logprobs, value)
    return found


def test_2500_datums_split_by_the_client_come_back_in_order(
    training: tinker.TrainingClient, model: Path, adapter: Path
) -> None:
    reference = Reference(model, adapter)
    dice = random.Random(1)
    sequences = [[dice.randrange(3, 1000) for _ in range(6)] for _ in range(2500)]
    data = [datum((s[:-1], {"target_tokens": s[1:], "weights": [1.0] * 5})) for s in sequences]
    found = training.forward_backward(data, "cross_entropy").result()
    assert len(found.loss_fn_outputs) == 2500
    with torch.no_grad():
        logits = reference.model(torch.tensor([s[:-1] for s in sequences])).logits
        wanted = logits.log_softmax(-1).gather(
            2, torch.tensor([s[1:] for s in sequences])[..., None]
        )
    got = np.array([output["logprobs"].data for output in found.loss_fn_outputs])
    assert got == pytest.approx(wanted[..., 0].numpy(), abs=NEAR)
    assert found.metrics["loss:sum"] == pytest.approx(-wanted.sum().item(), rel=NEAR)


@shows("TrainingClient.save_state", note="with its optimizer")
@shows("ServiceClient.create_training_client_from_state_with_optimizer")
@shows("ServiceClient.create_training_client_from_state", note="with a new optimizer")
@shows("TrainingClient.load_state", "TrainingClient.load_state_with_optimizer")
@pytest.mark.filterwarnings("ignore:.*load_state.*")
def test_a_saved_state_goes_on_as_if_nothing_had_been(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    data = [datum(one) for one in examples("cross_entropy")]

    def train(client: tinker.TrainingClient) -> float:
        client.forward_backward(data, "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=3e-3)).result()
        return client.forward(data, "cross_entropy").result().metrics["loss:sum"]

    train(training)
    train(training)
    path = training.save_state("two").result().path
    went_on = train(training)
    resumed = train(service.create_training_client_from_state_with_optimizer(path))
    assert resumed == pytest.approx(went_on, rel=1e-5)
    second = service.create_training_client_from_state(path)
    assert train(second) != pytest.approx(went_on, rel=1e-4), "the optimizer began again"
    second.load_state_with_optimizer(path).result()  # pyright: ignore[reportDeprecated]  # clients still call it
    assert train(second) == pytest.approx(went_on, rel=1e-5)
    second.load_state(path).result()  # pyright: ignore[reportDeprecated]  # clients still call it
    assert train(second) != pytest.approx(went_on, rel=1e-4)


def test_a_seed_makes_the_same_adapters_and_none_makes_others(
    service: tinker.ServiceClient,
) -> None:
    data = [datum(one) for one in examples("cross_entropy")]

    def after_a_step(**settings: Any) -> float:
        client = service.create_lora_training_client(base_model="tiny", rank=4, **settings)
        client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2))
        return client.forward(data, "cross_entropy").result().metrics["loss:sum"]

    # A GPU adds up in any order.
    assert after_a_step(seed=1) == pytest.approx(after_a_step(seed=1), rel=1e-6)
    assert len({after_a_step(seed=1), after_a_step(seed=2), after_a_step(), after_a_step()}) == 4
    assert after_a_step(seed=1) != after_a_step(seed=1, train_unembed=False)


def test_the_async_methods_are_the_same(service: tinker.ServiceClient) -> None:
    data = [datum(one) for one in examples("cross_entropy")]

    async def train() -> float:
        client = await service.create_lora_training_client_async(base_model="tiny", rank=4)
        gradient = await client.forward_backward_async(data, "cross_entropy")
        step = await client.optim_step_async(types.AdamParams(learning_rate=1e-2))
        await gradient
        await step
        sampler = await client.save_weights_and_get_sampling_client_async()
        prompt = types.ModelInput.from_ints([5, 17])
        found = await sampler.sample_async(prompt, 2, types.SamplingParams(max_tokens=3))
        return len(found.sequences)

    assert asyncio.run(train()) == 2


@shows("ServiceClient.close", note="its runs leave memory, samplers without a name the disk")
def test_a_closed_session_lets_go_of_its_runs(server: Server) -> None:
    service = server.client()
    training = service.create_lora_training_client(base_model="tiny", rank=4)
    run = training.get_info().model_id
    kept = training.save_weights_for_sampler("kept").result().path
    sampler = training.save_weights_and_get_sampling_client()
    unnamed = server.rest().get_sampler(sampler._sampling_session_id).result().model_path
    assert unnamed is not None
    service.close("success").result()
    rest = server.rest()
    assert run.split(":")[0] in rest.list_sessions(limit=100).result().sessions
    assert [one.tinker_path for one in rest.list_checkpoints(run).result().checkpoints] == [kept]
    later = server.client()
    with pytest.raises(tinker.NotFoundError, match="unknown checkpoint"):
        later.create_sampling_client(model_path=unnamed)
    later.create_sampling_client(model_path=kept)
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.post("get_info", json.dumps({"model_id": run}))
    assert refused.value.code == 404
    assert "its session has ended" in json.load(refused.value)["detail"]


def test_a_request_that_the_client_fails_to_send_does_not_stop_the_run(
    training: tinker.TrainingClient,
) -> None:
    data = [datum(example) for example in examples("cross_entropy", 1)]
    name: Any = 7
    with pytest.raises(ValueError, match="string"):
        training.save_state(name).result()
    assert training.forward(data, "cross_entropy").result(60).metrics["loss:sum"] > 0
    assert training.save_state("after").result(60).path.endswith("/weights/after")
