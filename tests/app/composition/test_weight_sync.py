"""Weights that one process trains and another serves."""

import platform
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
import torch

from support.store.records import step
from whet.app.composition.distributed import explain_unread
from whet.app.composition.samplers import LocalWeights
from whet.app.composition.weight_sync import (
    PolicyFollower,
    Publication,
    PublishedPolicy,
    PublishingTrainer,
    TrainerLease,
    read_policy,
)
from whet.config import AdamStep, LocalTrainerConfig, RunConfig
from whet.errors import EngineError, LeaseLost
from whet.models.huggingface import LocalPolicy
from whet.runners.agent import POLICY
from whet.store.sqlite import SQLiteStore
from whet.trainers.local import LocalTrainer
from whet.types import Attempt, AttemptId, Reward, Rollout

pytestmark = pytest.mark.anyio

TRAINER = LocalTrainerConfig(weights="lora", lora_rank=2)
CONFIG = RunConfig(trainer=TRAINER)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SQLiteStore]:
    async with SQLiteStore(tmp_path / "store.db") as store:
        yield store


class Side:
    """A process that trains."""

    def __init__(
        self, model: Path, store: SQLiteStore, folder: Path, epoch: int | None = None
    ) -> None:
        self.policy = LocalPolicy(model, TRAINER, device="cpu", seed=0)
        config = CONFIG.model_copy(update={"model": str(model)})
        self.trainer = PublishingTrainer(
            LocalTrainer(self.policy),
            self.policy,
            config,
            model,
            Publication(store, folder, epoch),
        )

    async def step(self) -> None:
        for parameter in self.policy.get_trainable().values():
            parameter.grad = torch.randn_like(parameter)
        await self.trainer.optim_step(AdamStep(lr=0.1))


def follower(model: Path, store: SQLiteStore, rank: int = 2) -> tuple[LocalPolicy, PolicyFollower]:
    trainer = LocalTrainerConfig(weights="lora", lora_rank=rank)
    policy = LocalPolicy(model, trainer, device="cpu", seed=7)
    served = PublishedPolicy(
        model=str(model.absolute()), trainer=trainer, seed=7, version=0, weights=""
    )
    return policy, PolicyFollower(LocalWeights(policy), served, store)


def attempt(version: int | None) -> Attempt:
    pins = {} if version is None else {POLICY: version}
    rollout = Rollout(id="a", group="a", task=1)
    return Attempt(id=AttemptId("a.1"), rollout=rollout, number=1, resources=pins)


def same(one: LocalPolicy, other: LocalPolicy) -> bool:
    pairs = zip(one.get_trainable().values(), other.get_trainable().values(), strict=True)
    return one.version == other.version and all(torch.equal(a, b) for a, b in pairs)


async def test_an_engine_elsewhere_serves_the_very_weights_of_the_attempts_version(
    model: Path, store: SQLiteStore, tmp_path: Path
) -> None:
    side = Side(model, store, tmp_path / "weights")
    policy, follow = follower(model, store)
    assert await side.trainer.publish() == 0
    await follow.prepare(attempt(1))
    assert same(side.policy, policy)
    await side.step()
    assert await side.trainer.publish() == 1
    edition = policy.revision
    await follow.prepare(attempt(1))  # an older attempt needs nothing new
    assert policy.revision == edition
    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(follow.prepare, attempt(2))
    assert same(side.policy, policy)
    assert policy.revision == edition + 1


async def test_a_trainer_that_was_suspended_cannot_replace_newer_weights(
    model: Path, store: SQLiteStore, tmp_path: Path
) -> None:
    notes: list[str] = []
    one = await TrainerLease.acquire(store, tmp_path / "a", notes.append)
    zombie = Side(model, store, tmp_path / "a", one.epoch)
    await zombie.trainer.publish()
    two = await TrainerLease.acquire(store, tmp_path / "b", notes.append)
    [note] = notes
    assert note.endswith(f" from the trainer {platform.node()}:{tmp_path}/a")
    newer = Side(model, store, tmp_path / "b", two.epoch)
    for number in range(3):
        await newer.step()
        await newer.trainer.publish()
        await two.commit(step(number))
    await zombie.step()
    with pytest.raises(LeaseLost, match="another trainer has taken over the run 'default'"):
        await zombie.trainer.publish()
    with pytest.raises(LeaseLost):
        await one.commit(step(3))
    assert read_policy(await store.latest(POLICY)).version == 3
    assert len(await one.steps()) == 3
    assert (await TrainerLease.acquire(store, tmp_path / "b", notes.append)).epoch == 3
    assert len(notes) == 1, "the same folder again is a restart"


async def test_only_new_weights_are_published_and_only_the_last_two_kept(
    model: Path, store: SQLiteStore, tmp_path: Path
) -> None:
    side = Side(model, store, tmp_path / "weights")
    await side.trainer.publish()
    await side.trainer.publish()
    assert (await store.latest(POLICY)).version == 1
    for _ in range(3):
        await side.step()
        await side.trainer.publish()
    files = sorted(file.name[:6] for file in (tmp_path / "weights").iterdir())
    assert files == ["000002", "000003"]


async def test_a_trainer_started_again_publishes_only_what_is_not_served(
    model: Path, store: SQLiteStore, tmp_path: Path
) -> None:
    side = Side(model, store, tmp_path / "weights")
    await side.step()
    await side.trainer.publish()
    await side.trainer.save(tmp_path / "one")
    await side.step()
    await side.trainer.publish()  # and killed before the step was committed

    again = Side(model, store, tmp_path / "weights")
    await again.trainer.restore(tmp_path / "one")
    assert await again.trainer.publish() == 1
    assert (await store.latest(POLICY)).version == 3
    policy, follow = follower(model, store)
    await follow.prepare(attempt(3))
    assert same(again.policy, policy)

    third = Side(model, store, tmp_path / "weights")
    await third.trainer.restore(tmp_path / "one")
    assert await third.trainer.publish() == 1
    assert (await store.latest(POLICY)).version == 3


async def test_attempts_that_want_no_version_get_what_is_newest(
    model: Path, store: SQLiteStore, tmp_path: Path
) -> None:
    policy, follow = follower(model, store)
    await follow.prepare(attempt(None))
    assert policy.version == 0
    side = Side(model, store, tmp_path / "weights")
    await side.step()
    await side.trainer.publish()
    with anyio.fail_after(10):
        while policy.version == 0:
            await anyio.sleep(0.05)
            await follow.prepare(attempt(None))
    assert same(side.policy, policy)


async def test_weights_that_cannot_be_served_are_an_error_with_what_to_do(
    model: Path, store: SQLiteStore, tmp_path: Path
) -> None:
    side = Side(model, store, tmp_path / "weights")
    await side.trainer.publish()
    policy, follow = follower(model, store, rank=4)
    with pytest.raises(EngineError, match="restart `whet serve`"):
        await follow.prepare(attempt(1))
    _, follow = follower(model, store)
    (file,) = (tmp_path / "weights").iterdir()
    file.unlink()
    with pytest.raises(EngineError, match="cannot load the weights"):
        await follow.prepare(attempt(1))
    assert policy.version == 0


async def test_runners_of_other_processes_know_which_rewards_the_training_reads(
    model: Path, store: SQLiteStore, tmp_path: Path
) -> None:
    reward = Reward(value=1, key="style")
    assert not await explain_unread(store, reward), "nothing is known of the training yet"
    await Side(model, store, tmp_path / "weights").trainer.publish()
    assert (await explain_unread(store, reward)).startswith("unknown key 'style'")
    assert not await explain_unread(store, Reward(value=1))


async def test_a_policy_that_cannot_be_read_does_not_end_a_runner(store: SQLiteStore) -> None:
    await store.publish("policy", {"unknown": 1})
    assert not await explain_unread(store, Reward(value=1, key="style"))
