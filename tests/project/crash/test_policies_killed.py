"""Two adapters learn opposite tasks in one run, which is killed and resumes."""

import json
from pathlib import Path

import anyio
import pytest

from support.runs.opposite_policies import (
    TRAINED,
    check_learned,
    check_records,
    replay,
    train_through_a_kill,
)
from support.servers.tinker_serving import KEY, MARKS, Server
from whet.app.run_folder import RunFolder

pytestmark = MARKS


def test_opposite_tasks_are_learned_by_two_policies_through_a_kill(tmp_path: Path) -> None:
    check_learned(train_through_a_kill(tmp_path, 16))


def test_each_is_trained_by_its_own_client_at_a_tinker_service(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    server = Server(tmp_path_factory.mktemp("tinker") / "dir")
    try:
        settings = f'trainer = {{ kind = "tinker", base_url = "{server.url}" }}'
        small = f"tasks_per_step = 2\ngroup_size = 4\n{settings}"
        folder = train_through_a_kill(tmp_path, 4, small, kill_after=2, spread=0.5)
        anyio.run(check_records, folder)
        anyio.run(check_service, folder)
        listed = server.rest().list_user_checkpoints().result().checkpoints
        states = [*folder.checkpoints.glob("*/*/state.json")]
        assert len(states) == len(TRAINED)
        for state in states:
            path = json.loads(state.read_text())["path"]
            assert path in {checkpoint.tinker_path for checkpoint in listed}
    finally:
        server.stop()


async def check_service(folder: RunFolder) -> None:
    """Check that each policy has the weights it has if it is trained alone on its own calls."""
    from whet.models.tinker import TinkerPolicy
    from whet.trainers.tinker import TinkerTrainer

    for name in TRAINED:
        policy = await TinkerPolicy.open(folder.read_config().for_policy(name))
        trainer = TinkerTrainer(policy)
        await replay(folder, name, trainer)
        alone = folder.path / "replayed" / name
        await trainer.export(alone)
        trained, replayed = (
            (place / "adapter_model.safetensors").read_bytes()
            for place in (folder.model / name, alone)
        )
        assert trained == replayed
        await policy.close()
