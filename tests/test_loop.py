from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from trajectories import Conversation, generation
from whet.algorithms.grpo import GRPO
from whet.config import AlgorithmConfig, RunConfig
from whet.errors import StoreError, TrainerError
from whet.loop import train
from whet.protocols import Collector, StepLog, Trainer
from whet.store.sqlite import SQLiteStore
from whet.trainers.fake import FakeTrainer
from whet.types import Failure, FailureKind, Group, Outcome, Rollout, StepRecord

pytestmark = pytest.mark.anyio

GROUPS, SIZE = 2, 3
SILENT_STEP = 2
CONFIG = RunConfig(steps=4, tasks_per_step=GROUPS, group_size=SIZE)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def plan(step: int) -> list[Rollout]:
    return [
        Rollout(id=f"s{step}-g{group}-{index}", task=index, group=f"s{step}-g{group}")
        for group in range(GROUPS)
        for index in range(SIZE)
    ]


class ScriptedCollector(Collector):
    """Runs rollouts through the store; a rollout that is done is read, not run again."""

    def __init__(self, store: SQLiteStore, *, outcome: Outcome | None = None) -> None:
        self._store = store
        self._outcome = outcome
        self.ran: list[str] = []

    async def collect(self, rollouts: Sequence[Rollout]) -> list[Group]:
        await self._store.enqueue(rollouts)
        while attempt := await self._store.claim("w", lease_s=60, wait_s=0):
            rollout = attempt.rollout
            self.ran.append(rollout.id)
            talk = Conversation(rollout.id, rollout.group)
            talk.call([1, 2], generation([3, len(self.ran) % 100]))
            for call in talk.calls:
                await self._store.append(call.model_copy(update={"attempt": attempt.id}))
            silent = rollout.id.startswith(f"s{SILENT_STEP}-")
            reward = 1.0 if silent else float(rollout.task == 0)
            await self._store.finish(attempt.id, self._outcome or Outcome(reward=reward))
        await self._store.wait([rollout.id for rollout in rollouts])
        found = await self._store.trajectories([rollout.id for rollout in rollouts])
        names = list(dict.fromkeys(rollout.group for rollout in rollouts))
        return [[t for t in found if t.attempt.rollout.group == name] for name in names]


class CannotSave(FakeTrainer):
    """Fails at the checkpoint of its second step, before or after writing it."""

    def __init__(self, *, after_writing: bool) -> None:
        super().__init__()
        self._after_writing = after_writing
        self._saves = 0

    async def save(self, folder: Path) -> None:
        self._saves += 1
        if self._saves < 2 or self._after_writing:
            await super().save(folder)
        if self._saves == 2:
            raise TrainerError("disk full")


class CannotCommit(StepLog):
    """A log that fails at the second step, once it is told of it or once it has it."""

    def __init__(self, log: StepLog, *, has_it: bool) -> None:
        self._log = log
        self._has_it = has_it

    async def commit(self, record: StepRecord) -> None:
        if record.step != 1 or self._has_it:
            await self._log.commit(record)
        if record.step == 1:
            raise StoreError("lost touch")

    async def steps(self) -> list[StepRecord]:
        return await self._log.steps()


async def run(
    folder: Path,
    store: SQLiteStore,
    trainer: Trainer,
    *,
    collector: Collector | None = None,
    log: StepLog | None = None,
    config: RunConfig = CONFIG,
) -> list[StepRecord]:
    records: list[StepRecord] = []
    with anyio.fail_after(20):
        async for record in train(
            plan,
            config,
            checkpoints=folder / "checkpoints",
            collector=collector or ScriptedCollector(store),
            algorithm=GRPO(AlgorithmConfig()),
            trainer=trainer,
            log=log or store,
        ):
            assert (await store.steps())[-1] == record, "yielded before it was durable"
            records.append(record)
    return records


def generations_of(step: int) -> list[str]:
    return [f"{rollout.id}.1.c0.0" for rollout in plan(step)]


def trained_by(records: Sequence[StepRecord]) -> list[list[str]]:
    return [generations_of(r.step) for r in records if r.step != SILENT_STEP]


async def test_steps_are_done_in_order_and_committed(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    async with SQLiteStore(tmp_path / "store.db") as store:
        records = await run(tmp_path, store, trainer)
        assert await store.steps() == records
    assert [record.step for record in records] == [0, 1, 2, 3]
    assert [record.version for record in records] == [1, 2, 2, 3]
    assert [record.consumed for record in records] == [
        tuple(rollout.id for rollout in plan(step)) for step in range(4)
    ]
    assert trainer.trained == trained_by(records)
    assert sum(len(s.logprobs) * s.weight for row in trainer.rows for s in row.spans) == (
        pytest.approx(3.0)
    ), "the weights of each step's rows sum to 1"


async def test_metrics_say_what_a_step_was(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "store.db") as store:
        [first, _, silent, _] = await run(tmp_path, store, FakeTrainer())
    expected = {
        "reward": pytest.approx(1 / 3),
        "rollouts": 6,
        "failed_rollouts": 0,
        "calls": 6,
        "rows": 6,
        "trained_rollouts": 6,
        "trained_tokens": 12,
        "unproven_rows": 0,
        "row_tokens": 24,
        "silent_groups": 0,
    }
    assert {name: first.metrics[name] for name in expected} == expected
    assert silent.metrics["rows"] == 0
    assert silent.metrics["silent_groups"] == 1
    assert "loss" not in silent.metrics


async def test_a_new_run_continues_after_the_last_step(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "store.db") as store:
        await run(tmp_path, store, FakeTrainer(), config=CONFIG.model_copy(update={"steps": 2}))
        trainer, collector = FakeTrainer(), ScriptedCollector(store)
        records = await run(tmp_path, store, trainer, collector=collector)
        assert [record.step for record in records] == [2, 3]
        assert collector.ran == [rollout.id for step in (2, 3) for rollout in plan(step)]
        assert trainer.trained == trained_by(await store.steps())
        assert await run(tmp_path, store, FakeTrainer()) == []


@pytest.mark.parametrize("after_writing", [False, True])
async def test_a_crash_at_the_checkpoint_does_the_step_again(
    tmp_path: Path, after_writing: bool
) -> None:
    async with SQLiteStore(tmp_path / "store.db") as store:
        crashed = CannotSave(after_writing=after_writing)
        with pytest.raises(TrainerError):
            await run(tmp_path, store, crashed)
        await check_the_second_step_is_done_once(tmp_path, store, crashed)


async def test_a_crash_at_the_commit_does_the_step_again(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "store.db") as store:
        crashed = FakeTrainer()
        with pytest.raises(StoreError):
            await run(tmp_path, store, crashed, log=CannotCommit(store, has_it=False))
        await check_the_second_step_is_done_once(tmp_path, store, crashed)


async def check_the_second_step_is_done_once(
    folder: Path, store: SQLiteStore, crashed: FakeTrainer
) -> None:
    assert [record.step for record in await store.steps()] == [0]
    trainer, collector = FakeTrainer(), ScriptedCollector(store)
    records = await run(folder, store, trainer, collector=collector)
    assert [record.step for record in records] == [1, 2, 3]
    assert not any(id_.startswith("s1-") for id_ in collector.ran), "rollouts were run twice"
    assert trainer.rows[:6] == crashed.rows[6:], "the same rows again"
    assert trainer.trained == trained_by(await store.steps())
    consumed = [id_ for record in await store.steps() for id_ in record.consumed]
    assert len(consumed) == len(set(consumed)) == 4 * GROUPS * SIZE


async def test_a_crash_right_after_the_commit_does_not_do_the_step_again(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "store.db") as store:
        with pytest.raises(StoreError):
            await run(tmp_path, store, FakeTrainer(), log=CannotCommit(store, has_it=True))
        trainer = FakeTrainer()
        records = await run(tmp_path, store, trainer)
        assert [record.step for record in records] == [2, 3]
        assert trainer.trained == trained_by(await store.steps())


async def test_rollouts_that_failed_are_consumed_and_counted(tmp_path: Path) -> None:
    failed = Outcome(failure=Failure(kind=FailureKind.TIMEOUT, message="too late"))
    async with SQLiteStore(tmp_path / "store.db") as store:
        [record] = await run(
            tmp_path,
            store,
            FakeTrainer(),
            collector=ScriptedCollector(store, outcome=failed),
            config=CONFIG.model_copy(update={"steps": 1}),
        )
    assert record.metrics["failed_rollouts"] == 6
    assert record.metrics["reward"] == 0
    assert record.version == 0
    assert len(record.consumed) == 6
