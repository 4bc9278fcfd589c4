"""A server of several models: clients choose by name, and what one trains is not another's."""

from collections.abc import Generator
from pathlib import Path

import pytest
import tinker
from safetensors.torch import load_file, save_file
from tinker import types

from support.servers.tinker_serving import MARKS, Server
from whet.models.catalog import resolve_model

pytestmark = MARKS

TOKENS = types.ModelInput.from_ints([5, 17, 42, 99])


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    folder = tmp_path_factory.mktemp("several")
    other = folder / "other"
    other.mkdir()
    for file in resolve_model("tiny").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = load_file(other / "model.safetensors")
    halved = {name: weight * 0.5 for name, weight in weights.items()}
    save_file(halved, other / "model.safetensors", {"format": "pt"})
    flags = ("--model", f"org/other={other}", "--model", f"org/again={other}")
    server = Server(folder / "dir", flags=flags)
    yield server
    server.stop()


def test_each_name_is_sampled_and_trained_by_its_own_model(several: Server, model: Path) -> None:
    service = several.client()
    listed = service.get_server_capabilities().supported_models
    assert [one.model_name for one in listed] == [str(model), "org/other", "org/again"]

    def score(base_model: str | None = None, model_path: str | None = None) -> list[float | None]:
        sampler = service.create_sampling_client(base_model=base_model, model_path=model_path)
        return sampler.compute_logprobs(TOKENS).result()

    base = score(base_model="tiny")
    other = score(base_model="org/other")
    assert other[1:] != pytest.approx(base[1:], abs=1e-2)
    assert score(base_model="org/again") == other
    paths: dict[str, str] = {}
    for name, expected in (("tiny", base), ("org/again", other)):
        training = service.create_lora_training_client(base_model=name, rank=2, seed=0)
        paths[name] = training.save_state("new").result().path
        assert score(model_path=paths[name])[1:] == pytest.approx(expected[1:], abs=1e-5)
    again = service.create_training_client_from_state(paths["org/again"])
    assert again.get_info().model_name == "org/other"
    with pytest.raises(tinker.BadRequestError, match="was trained on 'org/other', not 'tiny'"):
        service.create_sampling_client(base_model="tiny", model_path=paths["org/again"])
    with pytest.raises(tinker.BadRequestError, match="unknown model 'else': this server serves"):
        service.create_sampling_client(base_model="else")


def test_checkpoints_of_a_model_that_is_not_served_any_more_are_refused(
    several: Server,
) -> None:
    training = several.client().create_lora_training_client(base_model="org/other", rank=2)
    path = training.save_state("old").result().path
    several.stop()
    flags, several.flags = several.flags, ()
    try:
        several.start()
        with pytest.raises(tinker.BadRequestError, match="unknown model 'org/other'"):
            several.client().create_sampling_client(model_path=path)
    finally:
        several.stop()
        several.flags = flags
        several.start()
    assert several.client().create_sampling_client(model_path=path).get_base_model() == "org/other"
