"""The Tinker trainer: which checkpoints it keeps, and sampling from exported weights."""

import json
import shutil
from collections import Counter
from pathlib import Path
from urllib.error import HTTPError

import pytest

from support.models.tiny_llama import row_of
from support.servers.tinker_serving import MARKS, Server, open_tinker, tinker_config
from whet.app.composition.trainers import open_trainer
from whet.config import AdamStep, LossConfig
from whet.errors import EngineError
from whet.types import Sampling

pytestmark = [pytest.mark.anyio, *MARKS]

PROMPT = [1, 2, 3]


def kept(server: Server) -> Counter[str]:
    found = server.rest().list_user_checkpoints(limit=100).result().checkpoints
    return Counter(checkpoint.checkpoint_type for checkpoint in found)


async def test_the_last_two_samplers_and_states_stay(tinker: Server, tmp_path: Path) -> None:
    from whet.trainers.tinker import TinkerTrainer

    trainer = TinkerTrainer(await open_tinker(tinker))
    before = kept(tinker)
    folders = [tmp_path / str(step) for step in range(4)]
    for step, folder in enumerate(folders):
        await trainer.optim_step(AdamStep(lr=0.1))
        await trainer.publish()
        await trainer.save(folder)
        for old in folders[:step]:  # as the loop does once a step is committed
            shutil.rmtree(old, ignore_errors=True)
    assert kept(tinker) - before == {"sampler": 2, "training": 2}
    await trainer.restore(folders[-1])
    await trainer.save(folders[-1])
    assert kept(tinker) - before == {"sampler": 2, "training": 1}
    await trainer.restore(folders[-1])


async def test_another_policy_samples_from_exported_weights(tinker: Server, tmp_path: Path) -> None:
    from whet.models.tinker import TinkerPolicy
    from whet.trainers.tinker import TinkerTrainer

    trained = await open_tinker(tinker)
    trainer = TinkerTrainer(trained)
    other = await TinkerPolicy.connect(tinker_config(tinker))
    with pytest.raises(EngineError, match="no weights were published yet"):
        await other.sample(PROMPT, Sampling(), 1)
    rows = [row_of(PROMPT, [4, 5], [-5.0] * 2, 1.0, weight=0.25)]
    await trainer.forward_backward(rows, LossConfig())
    await trainer.optim_step(AdamStep(lr=1e-1))
    await trainer.publish()
    path = await trained.export_weights(tmp_path / "unused")

    greedy = Sampling(temperature=0.0)
    await other.sample_from("", 0)
    base = await other.sample(PROMPT, greedy, 4)
    await other.sample_from(path, 1)
    by_trainer, by_other = [await policy.sample(PROMPT, greedy, 4) for policy in (trained, other)]
    assert by_trainer == by_other
    assert by_other.version == 1
    assert base.logprobs != by_other.logprobs
    with pytest.raises(EngineError, match="cannot sample from 'tinker://gone'"):
        await other.sample_from("tinker://gone", 2)
    assert (await other.sample(PROMPT, greedy, 1)).version == 1
    await other.close()


async def test_the_end_of_a_run_ends_its_session(tinker: Server) -> None:
    config = tinker_config(tinker)
    before = {*tinker.rest().list_sessions(limit=100).result().sessions}
    async with open_trainer(config, Path(config.model)) as (trainer, _):
        await trainer.publish()
    [session] = {*tinker.rest().list_sessions(limit=100).result().sessions} - before
    with pytest.raises(HTTPError, match="410"):
        tinker.post("session_heartbeat", json.dumps({"session_id": session}))
