from collections.abc import Collection, Sequence
from pathlib import Path

import anyio
import pytest

from trajectories import Conversation, generation
from whet.algorithms.grpo import GRPO
from whet.config import AlgorithmConfig, RunConfig
from whet.errors import ConfigError, StoreError, TrainerError
from whet.loop import train
from whet.protocols import Algorithm, Collector, StepLog, Trainer
from whet.store.sqlite import SQLiteStore
from whet.trainers.fake import FakeTrainer
from whet.types import (
    Credit,
    Failure,
    FailureKind,
    GenerationId,
    Group,
    Outcome,
    Rollout,
    StepRecord,
)

pytestmark = pytest.mark.anyio

GROUPS, SIZE = 2, 3
SILENT_STEP = 2
SILENT = {f"g{GROUPS * SILENT_STEP + index:02d}" for index in range(GROUPS)}
CONFIG = RunConfig(steps=4, tasks_per_step=GROUPS, group_size=SIZE)


STANDING = {
    *("mismatch_kl", "clip_fraction", "entropy", "staleness", "staleness_max"),
    *("off_policy_tokens", "merge_ratio", "silent_groups", "reward", "reward_std", "rows"),
    *("row_tokens", "trained_tokens", "collect_seconds", "credit_seconds", "train_seconds"),
    *("publish_seconds", "save_seconds", "sampler_wait_seconds"),
}


def plan(group: int) -> list[Rollout]:
    return [
        Rollout(id=f"g{group:02d}-{index}", task=index, group=f"g{group:02d}")
        for index in range(SIZE)
    ]


def of_step(step: int) -> list[Rollout]:
    return [r for group in range(GROUPS * step, GROUPS * (step + 1)) for r in plan(group)]


class ScriptedCollector(Collector):
    """Runs rollouts through the store; a rollout that is done is read, not run again."""

    def __init__(
        self,
        store: SQLiteStore,
        *,
        outcome: Outcome | None = None,
        silent: Collection[str] = SILENT,
    ) -> None:
        self._store = store
        self._outcome = outcome
        self._silent = silent
        self.ran: list[str] = []

    async def begin(self, rollouts: Sequence[Rollout]) -> None:
        await self._store.enqueue(rollouts)

    async def wait(self, rollouts: Sequence[str]) -> None:
        await self._store.wait(rollouts)

    async def collect(self, rollouts: Sequence[Rollout]) -> list[Group]:
        await self.begin(rollouts)
        while attempt := await self._store.claim("w", lease_s=60, wait_s=0):
            rollout = attempt.rollout
            self.ran.append(rollout.id)
            talk = Conversation(rollout.id, rollout.group)
            talk.call([1, 2], generation([3, len(self.ran) % 100]))
            for call in talk.calls:
                await self._store.append(call.model_copy(update={"attempt": attempt.id}))
            reward = 1.0 if rollout.group in self._silent else float(rollout.task == 0)
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

    async def steps(self, *, after: int = -1, limit: int | None = None) -> list[StepRecord]:
        return await self._log.steps(after=after, limit=limit)


async def run(
    folder: Path,
    store: SQLiteStore,
    trainer: Trainer,
    *,
    collector: Collector | None = None,
    log: StepLog | None = None,
    config: RunConfig = CONFIG,
    algorithm: Algorithm | None = None,
) -> list[StepRecord]:
    records: list[StepRecord] = []
    with anyio.fail_after(20):
        async for record in train(
            plan,
            config,
            checkpoints=folder / "checkpoints",
            collector=collector or ScriptedCollector(store),
            algorithm=algorithm or GRPO(config.algorithm),
            trainer=trainer,
            log=log or store,
        ):
            assert (await store.steps())[-1] == record, "yielded before it was durable"
            records.append(record)
    return records


def generations_of(step: int) -> list[str]:
    return [f"{rollout.id}.1.c0.0" for rollout in of_step(step)]


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
        tuple(rollout.id for rollout in of_step(step)) for step in range(4)
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
        "reward_std": pytest.approx((2 / 9) ** 0.5),
        "merge_ratio": 1,
        "staleness": 0,
        "staleness_max": 0,
        "off_policy_tokens": 0,
    }
    assert {name: first.metrics[name] for name in expected} == expected
    assert set(first.metrics) >= STANDING
    assert silent.metrics["rows"] == 0
    trained_alone = {"mismatch_kl", "clip_fraction", "entropy", "trained_tokens"}
    assert set(silent.metrics) >= STANDING - trained_alone
    assert silent.metrics["silent_groups"] == 1
    assert "loss" not in silent.metrics


async def test_a_new_run_continues_after_the_last_step(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "store.db") as store:
        await run(tmp_path, store, FakeTrainer(), config=CONFIG.model_copy(update={"steps": 2}))
        trainer, collector = FakeTrainer(), ScriptedCollector(store)
        records = await run(tmp_path, store, trainer, collector=collector)
        assert [record.step for record in records] == [2, 3]
        assert collector.ran == [rollout.id for step in (2, 3) for rollout in of_step(step)]
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
    assert not {rollout.id for rollout in of_step(1)} & set(collector.ran), (
        "rollouts were run twice"
    )
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


REFILLED = CONFIG.model_copy(
    update={"steps": 3, "algorithm": AlgorithmConfig(refill=2)},
)
QUIET = {"g01", "g02", "g04", "g05", "g06", "g07"}
DRAWN = [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
"""Step by step: one of two speaks, then none of one, then the last; none of four; both."""


def numbers(record: StepRecord) -> tuple[int, ...]:
    return tuple(sorted({int(id_[1:3]) for id_ in record.consumed}))


async def test_silent_groups_are_refilled_up_to_the_limit_and_the_next_step_goes_on_from_there(
    tmp_path: Path,
) -> None:
    async with SQLiteStore(tmp_path / "store.db") as store:
        collector = ScriptedCollector(store, silent=QUIET)
        records = await run(tmp_path, store, FakeTrainer(), collector=collector, config=REFILLED)
    assert [numbers(record) for record in records] == DRAWN
    assert [r.metrics["groups"] for r in records] == [4, 4, 2]
    assert [r.metrics["silent_groups"] for r in records] == [0.5, 1, 0]
    assert [r.metrics["trained_rollouts"] for r in records] == [6, 0, 6]


@pytest.mark.parametrize("crash", ["at the checkpoint", "at the commit"])
async def test_a_refilled_step_is_drawn_again_as_it_was(tmp_path: Path, crash: str) -> None:
    async with SQLiteStore(tmp_path / "store.db") as store:
        broken = crash == "at the checkpoint"
        trainer = CannotSave(after_writing=False) if broken else FakeTrainer()
        log = store if broken else CannotCommit(store, has_it=False)
        first = ScriptedCollector(store, silent=QUIET)
        with pytest.raises((TrainerError, StoreError)):
            await run(tmp_path, store, trainer, collector=first, log=log, config=REFILLED)
        collector = ScriptedCollector(store, silent=QUIET)
        await run(tmp_path, store, FakeTrainer(), collector=collector, config=REFILLED)
        assert [numbers(record) for record in await store.steps()] == DRAWN
        assert {int(id_[1:3]) for id_ in collector.ran} == {8, 9}, "rollouts were run twice"


class Wrong(Algorithm):
    """Gives credit that cannot be used."""

    def __init__(self, how: str) -> None:
        self._how = how

    async def credit(self, groups: Sequence[Group], past: Sequence[StepRecord]) -> list[Credit]:
        trajectory = groups[0][0]
        [id_] = trajectory.generation_ids()
        match self._how:
            case "raises":
                raise ZeroDivisionError("oops")
            case "stranger":
                stranger = Conversation("elsewhere")
                stranger.call([1], generation([2]))
                return [Credit.even(stranger.ended(1.0), 1.0)]
            case "twice":
                return [Credit.even(trajectory, 1.0)] * 2
            case "unknown":
                return [Credit(trajectory, {GenerationId("none"): 1.0})]
            case "infinite":
                return [Credit.even(trajectory, float("inf"))]
            case _:
                return [Credit(trajectory, {id_: (1.0,)})]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "the algorithm Wrong raised: ZeroDivisionError: oops"),
        ("stranger", "credit to 'elsewhere', not of this step"),
        ("twice", "one trajectory twice"),
        ("unknown", "'none' of rollout 'g00-0', which is not one of its generations"),
        ("infinite", "not finite: inf"),
        ("short", "1 numbers for 2 tokens"),
    ],
)
async def test_credit_that_cannot_be_used_is_refused_by_name(
    tmp_path: Path, how: str, message: str
) -> None:
    async with SQLiteStore(tmp_path / "store.db") as store:
        with pytest.raises(ConfigError, match=message):
            await run(tmp_path, store, FakeTrainer(), algorithm=Wrong(how))
        assert await store.steps() == []
