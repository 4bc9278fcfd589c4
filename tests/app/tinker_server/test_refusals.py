"""Unsupported requests fail at once, with the client's own kinds of error."""

from typing import Any

import pytest
import tinker
from tinker import types

from support.servers.conformance import CLIENTS, PAGE, lines, methods, refuses, table
from support.servers.tinker_serving import KEY, MARKS, Server
from whet.app.cli.tinker_server import FOLDER
from whet.app.tinker_server.storage import Storage

pytestmark = MARKS


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def test_the_page_has_the_table_of_these_tests() -> None:
    # PYTHONPATH=tests python -c "from support.servers.conformance import table; print(table())"
    assert table() in PAGE.read_text()


def test_the_table_has_every_method_of_the_client() -> None:
    assert {line.method for line in lines()} == set(methods())
    offered = {name for name in vars(tinker) if name.endswith("Client")}
    assert {client.__name__ for client in CLIENTS} == offered


def test_a_wrong_key_is_refused_with_the_reason(server: Server) -> None:
    other = tinker.ServiceClient(base_url=server.url, api_key="tml-another")
    with pytest.raises(tinker.AuthenticationError, match="invalid API key"):
        other.get_server_capabilities()


def test_another_model_is_refused(service: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.BadRequestError, match="tiny'"):
        service.create_lora_training_client(base_model="Qwen/Qwen3-8B")
    with pytest.raises(tinker.BadRequestError, match="tiny'"):
        service.create_sampling_client(base_model="Qwen/Qwen3-8B")
    with pytest.raises(tinker.NotFoundError, match="unknown checkpoint"):
        service.create_sampling_client(model_path="tinker://nowhere/sampler_weights/x")


@pytest.mark.parametrize(
    ("data", "loss", "settings", "error"),
    [
        (datum([5], target_tokens=[6]), "cross_entropy", None, "takes target_tokens, weights"),
        (datum([5, 6], target_tokens=[6], weights=[1.0]), "cross_entropy", None, "shape"),
        (datum([5], target_tokens=[5000], weights=[1.0]), "cross_entropy", None, "outside 0"),
        (datum([-1], target_tokens=[5], weights=[1.0]), "cross_entropy", None, "outside 0"),
        (datum([5] * 2000, target_tokens=[5] * 2000, weights=[1.0] * 2000), "cross_entropy", None,
         "takes 1 to 1024"),
        (datum([5], target_tokens=[6], weights=[float("nan")]), "cross_entropy", None, "finite"),
        (datum([5], target_tokens=[6], logprobs=[-1.0], advantages=[1.0]), "ppo", {"clip": 1.0},
         "no setting 'clip'"),
        (datum([5], target_tokens=[6], logprobs=[-1.0], advantages=[1.0]), "ppo",
         {"clip_low_threshold": 1.5}, "clip_low"),
        (datum([5], target_tokens=[6], weights=[1.0]), "stable_reinforce", None, "unknown loss"),
        (datum([5], weights=[1.0]), "cross_entropy", None, "no target_tokens"),
        (datum([], target_tokens=[], weights=[]), "cross_entropy", None, "0 tokens"),
        (datum([5], target_tokens=[6], weights=[1e38]), "cross_entropy", None, "too large"),
    ],
)  # fmt: skip
def test_bad_data_is_the_users_error(
    service: tinker.ServiceClient, data: types.Datum, loss: Any, settings: Any, error: str
) -> None:
    training = service.create_lora_training_client(base_model="tiny", rank=2, seed=0)
    with pytest.raises(tinker.RequestFailedError, match=error) as caught:
        training.forward_backward([data], loss, settings).result()
    assert caught.value.category == types.RequestErrorCategory.User
    good = datum([5], target_tokens=[6], weights=[1.0])
    assert training.forward([good], "cross_entropy").result().metrics["loss:sum"] > 0


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0])
def test_a_step_that_cannot_be_leaves_the_run_as_it_is(
    training: tinker.TrainingClient, rate: float
) -> None:
    data = [datum([5], target_tokens=[6], weights=[1.0])]
    before = training.forward(data, "cross_entropy").result().metrics
    gradient = training.forward_backward(data, "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match="learning_rate") as caught:
        training.optim_step(types.AdamParams(learning_rate=rate)).result()
    assert caught.value.category == types.RequestErrorCategory.User
    gradient.result()
    # The client has counted the step: the next request is not waited for in vain.
    assert training.forward(data, "cross_entropy").result(timeout=60).metrics == before


def test_names_are_taken_once_and_lead_nowhere_else(training: tinker.TrainingClient) -> None:
    training.save_state("mine").result()
    with pytest.raises(tinker.RequestFailedError, match="overwrite=True"):
        training.save_state("mine").result()
    training.save_state("mine", overwrite=True).result()
    for name in ("../../elsewhere", "", "a/b", ".hidden"):
        with pytest.raises(tinker.RequestFailedError, match=r"invalid (name|checkpoint)"):
            training.save_state(name).result()


def test_the_name_of_an_expired_checkpoint_is_free(
    server: Server, service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    path = training.save_state("short", ttl_seconds=3600).result().path
    storage = Storage(server.folder / FOLDER)
    expired = storage.read_checkpoint(path).model_copy(update={"expires": 1.0})
    storage.change(expired)
    with pytest.raises(tinker.NotFoundError, match="has expired"):
        service.create_sampling_client(model_path=path)
    training.save_state("short").result()
    service.create_sampling_client(model_path=path)


def test_a_checkpoint_is_deleted_by_its_kind_and_name(
    training: tinker.TrainingClient, rest: tinker.RestClient
) -> None:
    training.save_state("kept").result()
    run = training.get_info().model_id
    with pytest.raises(tinker.BadRequestError, match="expected one of weights/kept, sampler"):
        rest.delete_checkpoint(run, "kept").result()
    assert rest.list_checkpoints(run).result().checkpoints


def test_adapters_of_another_shape_are_not_loaded(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    sampler = training.save_weights_for_sampler("only-sampled").result().path
    other = service.create_lora_training_client(base_model="tiny", rank=2)
    with pytest.raises(tinker.RequestFailedError, match="sampler weights"):
        service.create_training_client_from_state(sampler)
    state = other.save_state("small").result().path
    with (
        pytest.warns(Warning, match="load_state"),
        pytest.raises(tinker.RequestFailedError, match="rank 2"),
    ):
        training.load_state(state).result()  # pyright: ignore[reportDeprecated]  # clients still call it


def test_prompts_that_do_not_fit(service: tinker.ServiceClient) -> None:
    base = service.create_sampling_client(base_model="tiny")
    for tokens, error in (([5] * 1024, "context"), ([5000], "outside 0")):
        prompt = types.ModelInput.from_ints(tokens)
        with pytest.raises(tinker.RequestFailedError, match=error) as caught:
            base.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()
        assert caught.value.category == types.RequestErrorCategory.User


def test_another_optimizer_is_refused(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    dimuon = types.DimuonOptimizerConfig()
    with pytest.raises(tinker.BadRequestError, match="unsupported optimizer"):
        service.create_lora_training_client(base_model="tiny", optimizer=dimuon)
    with pytest.raises(tinker.RequestFailedError, match="supports AdamW only"):
        training.optim_step(types.DimuonParams(learning_rate=0.1)).result()


ONE_PROJECT = "this server has one project"
NO_BILLS = "this server has no billing"
NO_AUDIT = "this server has no audit log"


@refuses(
    {
        "ServiceClient.copy_weights": ONE_PROJECT,
        "RestClient.copy_weights": ONE_PROJECT,
        "RestClient.assign_session_project": ONE_PROJECT,
        "RestClient.export_session_trace": "this server records no timelines",
        "RestClient.search_sessions": "this server cannot search sessions",
        "RestClient.whoami": "the credential is a plain API key",
        "RestClient.get_audit_log": NO_AUDIT,
        "RestClient.get_billing_usage": NO_BILLS,
        "RestClient.get_current_checkpoint_storage_usage": NO_BILLS,
        "AdminClient.get_audit_log": NO_AUDIT,
        "AdminClient.get_billing_usage": NO_BILLS,
        "AdminClient.get_current_checkpoint_storage_usage": NO_BILLS,
    }
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_is_not_there_is_refused_at_once(method: str, reason: str, server: Server) -> None:
    path, month = "tinker://run/weights/one", ("2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z")
    arguments: dict[str, tuple[Any, ...]] = {
        "ServiceClient.copy_weights": (path,),
        "RestClient.copy_weights": (path, "project"),
        "RestClient.assign_session_project": ("session", "project"),
        "RestClient.export_session_trace": ("session",),
        "RestClient.search_sessions": (types.SessionSearchRequest(),),
        "RestClient.get_billing_usage": month,
        "AdminClient.get_billing_usage": month,
    }
    client, name = method.split(".")
    project = {"project_id": "project"} if client == "ServiceClient" else {}
    caller = getattr(tinker, client)(base_url=server.url, api_key=KEY, **project)
    # The client itself refuses whoami: it reads a token that this server does not give.
    kind = RuntimeError if name == "whoami" else tinker.NotFoundError
    with pytest.raises(kind, match=reason):
        getattr(caller, name)(*arguments.get(method, ())).result(timeout=10)
