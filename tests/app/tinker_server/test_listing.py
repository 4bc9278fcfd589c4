"""Runs and checkpoints on disk, as the client lists and changes them."""

from pathlib import Path

import pytest
import tinker

from support.servers.conformance import shows
from support.servers.tinker_serving import MARKS

pytestmark = MARKS


@shows("RestClient.list_checkpoints", "RestClient.list_user_checkpoints")
@shows("RestClient.delete_checkpoint", "RestClient.delete_checkpoint_from_tinker_path")
@shows("RestClient.set_checkpoint_ttl_from_tinker_path")
@shows(
    "RestClient.publish_checkpoint_from_tinker_path",
    "RestClient.unpublish_checkpoint_from_tinker_path",
    note="noted; there is one key",
)
def test_checkpoints_are_listed_changed_and_deleted(
    training: tinker.TrainingClient, rest: tinker.RestClient
) -> None:
    run = training.get_info().model_id
    state = training.save_state("one", user_metadata={"why": "a test"}).result().path
    sampler = training.save_weights_for_sampler("one", ttl_seconds=3600).result().path
    training.save_weights_and_get_sampling_client()

    def listed() -> dict[str, tinker.types.Checkpoint]:
        found = rest.list_checkpoints(run).result().checkpoints
        return {one.tinker_path: one for one in found}

    found = listed()
    assert set(found) == {state, sampler}, "what has no name is not listed"
    assert found[state].checkpoint_type == "training"
    assert found[state].user_metadata == {"why": "a test"}
    assert found[state].expires_at is None
    assert (found[state].size_bytes or 0) > 1000
    assert found[sampler].checkpoint_type == "sampler"
    assert found[sampler].expires_at is not None
    everything = rest.list_user_checkpoints(limit=500).result().checkpoints
    assert {state, sampler} <= {one.tinker_path for one in everything}

    rest.publish_checkpoint_from_tinker_path(state).result()
    rest.set_checkpoint_ttl_from_tinker_path(state, 7200).result()
    assert listed()[state].public
    assert listed()[state].expires_at is not None
    rest.unpublish_checkpoint_from_tinker_path(state).result()
    rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
    assert not listed()[state].public
    assert listed()[state].expires_at is None

    rest.delete_checkpoint_from_tinker_path(state).result()
    rest.delete_checkpoint(run, "sampler_weights/one").result()
    assert listed() == {}
    with pytest.raises(tinker.NotFoundError, match="unknown checkpoint"):
        rest.delete_checkpoint_from_tinker_path(state).result()


@shows("RestClient.get_training_run", "RestClient.get_training_run_by_tinker_path")
@shows("RestClient.list_training_runs", "RestClient.get_weights_info_by_tinker_path")
@shows("RestClient.get_session", "RestClient.list_sessions")
def test_runs_and_sessions_are_listed(
    training: tinker.TrainingClient, rest: tinker.RestClient, model: Path
) -> None:
    run = training.get_info().model_id
    path = training.save_state("listed").result().path
    found = rest.get_training_run(run).result()
    assert (found.base_model, found.lora_rank) == (str(model), 8)
    assert found.last_checkpoint is not None
    assert found.last_checkpoint.tinker_path == path
    assert rest.get_training_run_by_tinker_path(path).result().training_run_id == run
    listed = rest.list_training_runs(limit=500).result()
    assert run in [one.training_run_id for one in listed.training_runs]
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank, info.train_unembed) == (str(model), 8, True)
    session = run.split(":")[0]
    assert session in rest.list_sessions(limit=500).result().sessions
    assert run in rest.get_session(session).result().training_run_ids
