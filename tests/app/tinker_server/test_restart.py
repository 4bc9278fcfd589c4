"""Whatever was saved is there after a kill."""

import random
import time
from collections.abc import Generator
from typing import Any, cast

import pytest
import tinker
from tinker import types

from support.servers.conformance import shows
from support.servers.tinker_serving import KEY, MARKS, Server, make_datum

pytestmark = MARKS

TOKENS = [5, 17, 42, 99, 120, 7]
DATA = [
    make_datum(
        types.ModelInput.from_ints(TOKENS[:-1]),
        {"target_tokens": TOKENS[1:], "weights": [1.0] * 5},
    )
]

DICE = random.Random(1)
LONG = [
    make_datum(
        types.ModelInput.from_ints([DICE.randrange(3, 1000) for _ in range(600)]),
        {"target_tokens": [5] * 600, "weights": [1.0] * 600},
    )
    for _ in range(300)
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    server = Server(tmp_path_factory.mktemp("restarted") / "dir")
    yield server
    server.stop()


def step(client: tinker.TrainingClient) -> float:
    client.forward_backward(DATA, "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=3e-3)).result()
    return client.forward(DATA, "cross_entropy").result().metrics["loss:sum"]


@shows("SamplingClient.from_sampler_handle", note="also after a restart of the server")
def test_a_kill_between_steps_loses_nothing_that_was_saved(server: Server) -> None:
    service = server.client()
    training = service.create_lora_training_client(base_model="tiny", rank=8, seed=1)
    step(training)
    state = training.save_state("after-one").result().path
    sampler = training.save_weights_for_sampler("after-one").result().path
    sampling = service.create_sampling_client(model_path=sampler)
    handle = sampling.get_sampler_handle()
    prompt = types.ModelInput.from_ints(TOKENS)
    before = sampling.compute_logprobs(prompt).result()
    undisturbed = [step(training), step(training)]
    server.kill()
    server.start()
    # A client that held on samples from the same weights, and so does a handle.
    assert sampling.compute_logprobs(prompt).result() == pytest.approx(before, abs=1e-5)
    again = tinker.SamplingClient.from_sampler_handle(handle, api_key=KEY)
    assert again.compute_logprobs(prompt).result() == pytest.approx(before, abs=1e-5)
    with pytest.raises(tinker.NotFoundError, match="from_state_with_optimizer"):
        training.forward(DATA, "cross_entropy").result()
    resumed = server.client().create_training_client_from_state_with_optimizer(state)
    assert [step(resumed), step(resumed)] == pytest.approx(undisturbed, rel=1e-5)


def test_a_kill_in_the_middle_of_a_step_leaves_what_was_saved_before(server: Server) -> None:
    training = server.client().create_lora_training_client(base_model="tiny", rank=8, seed=1)
    step(training)
    state = training.save_state("whole").result().path
    undisturbed = step(training)
    run = training.get_info().model_id
    # A pass that takes seconds, and a step and a save that wait for it.
    gradient = training.forward_backward(LONG, "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=3e-3))
    training.save_state("half")
    time.sleep(1)
    assert not cast(Any, gradient).future().done()  # Any: not in the type of the client
    server.kill()
    server.start()
    found = server.rest().list_checkpoints(run).result().checkpoints
    assert [one.tinker_path for one in found] == [state]
    with pytest.raises(Exception, match="expired/broken"):  # the client's kind is its own business
        gradient.result(timeout=60)
    resumed = server.client().create_training_client_from_state_with_optimizer(state)
    assert step(resumed) == pytest.approx(undisturbed, rel=1e-5)
