"""Weights that one process trains and another serves."""

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
import torch

from whet.app.local_sampler import LocalWeights
from whet.app.published import PolicyFollower, PublishedPolicy, PublishingTrainer
from whet.config import AdamConfig, RunConfig, TrainerConfig
from whet.errors import EngineError
from whet.policies.local import LocalPolicy
from whet.runners.given import POLICY
from whet.store.sqlite import SQLiteStore
from whet.trainers.local import LocalTrainer
from whet.types import Attempt, AttemptId, Rollout

pytestmark = pytest.mark.anyio

CONFIG = RunConfig(trainer=TrainerConfig(weights="lora", lora_rank=2))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SQLiteStore]:
    async with SQLiteStore(tmp_path / "store.db") as store:
        yield store


class Side:
    """A process that trains."""

    def __init__(self, model: Path, store: SQLiteStore, folder: Path) -> None:
        self.policy = LocalPolicy(model, CONFIG.trainer, device="cpu", seed=0)
        config = CONFIG.model_copy(update={"model": str(model)})
        self.trainer = PublishingTrainer(
            LocalTrainer(self.policy),
            self.policy,
            config,
            model=model,
            resources=store,
            folder=folder,
        )

    async def step(self) -> None:
        for parameter in self.policy.trainable().values():
            parameter.grad = torch.randn_like(parameter)
        await self.trainer.optim_step(AdamConfig(lr=0.1))


def follower(model: Path, store: SQLiteStore, rank: int = 2) -> tuple[LocalPolicy, PolicyFollower]:
    trainer = TrainerConfig(weights="lora", lora_rank=rank)
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
    pairs = zip(one.trainable().values(), other.trainable().values(), strict=True)
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
    edition = policy.edition
    await follow.prepare(attempt(1))  # an older attempt needs nothing new
    assert policy.edition == edition
    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(follow.prepare, attempt(2))
    assert same(side.policy, policy)
    assert policy.edition == edition + 1


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


async def test_what_cannot_be_served_is_said(
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
