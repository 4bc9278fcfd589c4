"""The overlapped loop: staleness is bounded, and no work is done twice after a crash."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from random import Random

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.store.failing_log import FailingLog
from support.store.trajectories import Conversation, generation
from whet.algorithms import build_algorithm
from whet.config import AdamStep, LossConfig, RunConfig, resolve
from whet.errors import StoreError, TrainerError
from whet.protocols import StepLog
from whet.runners.collector import QueueCollector
from whet.store.sqlite import SQLiteStore
from whet.trainers.fake import FakeTrainer
from whet.training import async_loop as overlapped
from whet.training import loop
from whet.training.checkpoints import restore_steps
from whet.types import Metrics, Outcome, Rollout, Row, StepRecord

pytestmark = pytest.mark.anyio

SIZE = 2


def config(staleness: int = 2, oversample: int = 1, steps: int = 5) -> RunConfig:
    return resolve(
        {
            "steps": steps,
            "tasks_per_step": 2,
            "group_size": SIZE,
            "loop": {"name": "overlapped", "max_staleness": staleness},
            "algorithm": {"oversample": oversample},
        }
    )


def plan(group: int) -> list[Rollout]:
    return [
        Rollout(id=f"g{group:02d}-{index}", task=index, group=f"g{group:02d}")
        for index in range(SIZE)
    ]


class Sampler:
    """Runs rollouts one after the other, in an order and at a pace that dice decide.

    What a rollout earns depends on its id alone; every third group is silent.
    """

    def __init__(self, store: SQLiteStore, dice: Random) -> None:
        self._store = store
        self._dice = dice
        self.version = 0
        self.ran: list[str] = []
        self.ready = anyio.Event()
        """Set once the weights are restored."""

    async def run(self) -> None:
        await self.ready.wait()
        while True:
            attempt = await self._store.claim("w", lease_s=60, wait_s=60)
            if attempt is None:
                continue
            rollout = attempt.rollout
            self.ran.append(rollout.id)
            talk = Conversation(rollout.id, rollout.group)
            talk.call([1, 2], generation([3, 4], version=self.version))
            for _ in range(self._dice.randrange(4)):
                await anyio.lowlevel.checkpoint()
            [call] = talk.calls
            await self._store.append(call.model_copy(update={"attempt": attempt.id}))
            silent = int(rollout.group[1:]) % 3 == 0
            reward = 1.0 if silent else float(rollout.id.endswith("0"))
            await self._store.finish(attempt.id, Outcome(reward=reward))


@asynccontextmanager
async def sampling(store: SQLiteStore, sampler: Sampler) -> AsyncGenerator[None]:
    await store.release_workers()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.run)
        yield
        tasks.cancel_scope.cancel()


class Breaks(FakeTrainer):
    """Publishes to the sampler; breaks at the n-th of all its acts."""

    def __init__(self, sampler: Sampler, at: int | None = None) -> None:
        super().__init__(on_publish=self._publish)
        self.sampler = sampler
        self._left = at

    def _publish(self, version: int) -> None:
        self.sampler.version = version

    def _act(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise TrainerError("broken")

    async def forward_backward(self, rows: Sequence[Row], loss: LossConfig) -> Metrics:
        self._act()
        return await super().forward_backward(rows, loss)

    async def optim_step(self, adam: AdamStep) -> Metrics:
        self._act()
        return await super().optim_step(adam)

    async def snapshot(self) -> Callable[[Path], None]:
        write = await super().snapshot()

        def act(folder: Path) -> None:
            self._act()
            write(folder)
            self._act()

        return act


async def train(
    folder: Path,
    store: SQLiteStore,
    trainer: "Breaks",
    chosen: RunConfig,
    log: StepLog | None = None,
) -> list[StepRecord]:
    kind = overlapped if chosen.loop.name == "overlapped" else loop
    collector, algorithm = QueueCollector(queue=store, log=store), build_algorithm(chosen)
    with anyio.fail_after(60):
        await restore_steps(
            plan,
            chosen,
            checkpoints=folder / "checkpoints",
            collector=collector,
            algorithm=algorithm,
            trainer=trainer,
            log=store,
        )
        await trainer.publish()
        trainer.sampler.ready.set()
        records = kind.train(
            plan,
            chosen,
            checkpoints=folder / "checkpoints",
            collector=collector,
            algorithm=algorithm,
            trainer=trainer,
            log=log or store,
        )
        async with aclosing(records):
            return [record async for record in records]


def lasting(record: StepRecord) -> StepRecord:
    """A record without what depends on time."""
    kept = {
        key: value
        for key, value in record.metrics.items()
        if not key.endswith("_seconds") and "stale" not in key and key != "off_policy_fraction"
    }
    return record.model_copy(update={"metrics": kept})


async def whole_run(folder: Path, chosen: RunConfig, seed: int = 0) -> list[StepRecord]:
    async with SQLiteStore(folder.with_suffix(".db")) as store:
        sampler = Sampler(store, Random(seed))
        async with sampling(store, sampler):
            return await train(folder, store, Breaks(sampler), chosen)


async def test_steps_take_the_groups_that_the_on_policy_loop_takes(tmp_path: Path) -> None:
    ahead = await whole_run(tmp_path / "a", config())
    on_policy = config().model_copy(update={"loop": RunConfig().loop})
    straight = await whole_run(tmp_path / "b", on_policy)
    assert [record.consumed for record in ahead] == [record.consumed for record in straight]
    assert all(record.metrics["staleness_max"] == 0 for record in straight)
    assert all("sampler_wait_seconds" in record.metrics for record in [*ahead, *straight])


async def test_rollouts_go_on_while_a_step_is_trained(tmp_path: Path) -> None:
    """Training waits until the next step's rollouts have run: on policy it would wait for ever."""
    async with SQLiteStore(tmp_path / "store.db") as store:
        sampler = Sampler(store, Random(0))

        class Patient(Breaks):
            async def optim_step(self, adam: AdamStep) -> Metrics:
                if self.version < 4:
                    next_up = [r.id for group in (2, 3) for r in plan(2 * self.version + group)]
                    await store.wait(next_up)
                return await super().optim_step(adam)

        chosen = resolve(
            {
                "steps": 5,
                "tasks_per_step": 2,
                "group_size": SIZE,
                "loop": {"name": "overlapped"},
                "algorithm": {"name": "positive"},
            }
        )
        async with sampling(store, sampler):
            records = await train(tmp_path, store, Patient(sampler), chosen)
        assert [r.metrics["staleness"] for r in records] == [0, 1, 1, 1, 1]
        assert [r.metrics["off_policy_fraction"] for r in records] == [0, 1, 1, 1, 1]


@settings(max_examples=12)
@given(
    staleness=st.integers(1, 4),
    oversample=st.integers(1, 3),
    steps=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    breaks=st.lists(st.integers(0, 12), max_size=3),
)
async def test_no_token_is_staler_than_the_bound_and_every_rollout_is_consumed_once(
    tmp_path_factory: pytest.TempPathFactory,
    staleness: int,
    oversample: int,
    steps: int,
    seed: int,
    breaks: list[int],
) -> None:
    folder = tmp_path_factory.mktemp("overlapped")
    chosen = config(staleness, oversample, steps)
    dice = Random(seed)
    async with SQLiteStore(folder / "store.db") as store:
        for at in [*breaks, None]:
            sampler = Sampler(store, dice)
            async with sampling(store, sampler):
                try:
                    await train(folder, store, Breaks(sampler, at), chosen)
                except TrainerError:
                    continue
        records = await store.steps()
        assert [record.step for record in records] == list(range(steps))
        assert max(record.metrics["staleness_max"] for record in records) <= staleness
        consumed = [id_ for record in records for id_ in record.consumed]
        groups = len(consumed) // SIZE
        assert consumed == [rollout.id for group in range(groups) for rollout in plan(group)]
        assert (await store.counts())["rollouts"] == len(consumed), "begun, and never consumed"


async def test_broken_at_every_point_the_records_are_those_of_a_run_that_was_not(
    tmp_path: Path,
) -> None:
    chosen = config(oversample=2, steps=4)
    whole = [lasting(record) for record in await whole_run(tmp_path / "whole", chosen)]
    acts = 4 * 4
    for at in range(acts):
        folder = tmp_path / str(at)
        async with SQLiteStore(tmp_path / f"{at}.db") as store:
            for break_at in (at, None):
                sampler = Sampler(store, Random(at))
                async with sampling(store, sampler):
                    try:
                        await train(folder, store, Breaks(sampler, break_at), chosen)
                    except TrainerError:
                        continue
            assert [lasting(record) for record in await store.steps()] == whole


@pytest.mark.parametrize("commits", [False, True])
async def test_broken_at_the_commit_too(tmp_path: Path, commits: bool) -> None:
    async with SQLiteStore(tmp_path / "store.db") as store:
        sampler = Sampler(store, Random(1))
        async with sampling(store, sampler):
            with pytest.raises(StoreError, match="lost touch"):
                await train(
                    tmp_path, store, Breaks(sampler), config(), FailingLog(store, commits=commits)
                )
        again = Sampler(store, Random(2))
        async with sampling(store, again):
            await train(tmp_path, store, Breaks(again), config())
        records = await store.steps()
        assert [record.step for record in records] == [0, 1, 2, 3, 4]
        assert not set(sampler.ran[:-1]) & set(again.ran), "rollouts were run twice"
