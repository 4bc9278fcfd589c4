"""The training loop: order of steps, metrics, checkpoints and resuming."""

import shutil
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import aclosing
from pathlib import Path

import anyio
import pytest
from pydantic import JsonValue

from support.store.failing_log import FailingLog
from support.store.trajectories import Conversation, generation
from whet.algorithms.grpo import GRPO
from whet.config import AdamStep, AlgorithmConfig, LoopConfig, LossConfig, RunConfig, resolve
from whet.errors import ConfigError, NonFiniteUpdate, StoreError, TrainerError
from whet.protocols import Algorithm, Collector, StepLog, TrainingBackend
from whet.store.sqlite import SQLiteStore
from whet.trainers.fake import FakeTrainer
from whet.training.checkpoints import restore_steps
from whet.training.loop import train
from whet.training.step import Evaluate
from whet.training.stopping import explain_stop, find_best_step
from whet.types import (
    Credit,
    Failure,
    FailureKind,
    GenerationId,
    Group,
    Metrics,
    Outcome,
    Rollout,
    Row,
    StepRecord,
)

pytestmark = pytest.mark.anyio

GROUPS, SIZE = 2, 3
SILENT_STEP = 2
SILENT = {f"g{GROUPS * SILENT_STEP + index:02d}" for index in range(GROUPS)}
CONFIG = RunConfig(steps=4, tasks_per_step=GROUPS, group_size=SIZE)


STANDING = {
    *("mismatch_kl", "clip_fraction", "entropy", "staleness", "staleness_max"),
    *(
        "off_policy_fraction",
        "calls_per_row",
        "zero_signal_fraction",
        "reward",
        "reward_std",
        "rows",
    ),
    *("row_tokens", "trained_tokens", "collect_seconds", "credit_seconds", "train_seconds"),
    *("publish_seconds", "save_seconds", "sampler_wait_seconds"),
}


def changed(values: dict[str, JsonValue]) -> RunConfig:
    return resolve({**CONFIG.model_dump(mode="json"), **values})


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
        is_certain: bool = False,
    ) -> None:
        self._store = store
        self._outcome = outcome
        self._silent = silent
        self._is_certain = is_certain
        """Whether every answer is the same."""
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
            sampled = 0 if self._is_certain else len(self.ran) % 100
            talk.call([1, 2], generation([3, sampled]))
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

    async def snapshot(self) -> Callable[[Path], None]:
        write = await super().snapshot()

        def fail(folder: Path) -> None:
            self._saves += 1
            if self._saves < 2 or self._after_writing:
                write(folder)
            if self._saves == 2:
                raise TrainerError("disk full")

        return fail


async def run(
    folder: Path,
    store: SQLiteStore,
    trainer: TrainingBackend,
    *,
    collector: Collector | None = None,
    log: StepLog | None = None,
    config: RunConfig = CONFIG,
    algorithm: Algorithm | None = None,
    evaluate: Evaluate | None = None,
) -> list[StepRecord]:
    records: list[StepRecord] = []
    collector = collector or ScriptedCollector(store)
    algorithm = algorithm or GRPO(config.algorithm)
    with anyio.fail_after(20):
        await restore_steps(
            plan,
            config,
            checkpoints=folder / "checkpoints",
            collector=collector,
            algorithm=algorithm,
            trainer=trainer,
            log=store,
        )
        async with aclosing(
            train(
                plan,
                config,
                checkpoints=folder / "checkpoints",
                collector=collector,
                algorithm=algorithm,
                trainer=trainer,
                log=log or store,
                evaluate=evaluate,
            )
        ) as steps:
            async for record in steps:
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
        kept = [await store.advantages(record.step) for record in records]
    assert [list(each) for each in kept] == [
        [] if step == SILENT_STEP else generations_of(step) for step in range(4)
    ]
    assert set(kept[0].values()) == {1 - 1 / SIZE, -1 / SIZE}
    assert [record.step for record in records] == [0, 1, 2, 3]
    assert [record.version for record in records] == [1, 2, 2, 3]
    assert [record.consumed for record in records] == [
        tuple(rollout.id for rollout in of_step(step)) for step in range(4)
    ]
    assert trainer.trained == trained_by(records)
    assert sum(len(s.logprobs) * s.weight for row in trainer.rows for s in row.segments) == (
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
        "unproven_generations": 0,
        "row_tokens": 24,
        "zero_signal_fraction": 0,
        "reward_std": pytest.approx((2 / 9) ** 0.5),
        "calls_per_row": 1,
        "staleness": 0,
        "staleness_max": 0,
        "off_policy_fraction": 0,
    }
    assert {name: first.metrics[name] for name in expected} == expected
    assert set(first.metrics) >= STANDING
    assert silent.metrics["rows"] == 0
    trained_alone = {"mismatch_kl", "clip_fraction", "entropy", "trained_tokens"}
    assert set(silent.metrics) >= STANDING - trained_alone
    assert silent.metrics["zero_signal_fraction"] == 1
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
async def test_a_step_without_a_checkpoint_is_made_up_for_from_its_rollouts(
    tmp_path: Path, after_writing: bool
) -> None:
    async with SQLiteStore(tmp_path / "store.db") as store:
        crashed = CannotSave(after_writing=after_writing)
        with pytest.raises(TrainerError, match="disk full"):
            await run(tmp_path, store, crashed)
        # The second step was committed; the third waited for its checkpoint.
        assert [record.step for record in await store.steps()] == [0, 1]
        trainer, collector = FakeTrainer(), ScriptedCollector(store)
        records = await run(tmp_path, store, trainer, collector=collector)
        assert [record.step for record in records] == [2, 3]
        assert collector.ran == [rollout.id for rollout in of_step(3)], "rollouts were run twice"
        assert trainer.rows[:6] == crashed.rows[6:12] or after_writing, "the same rows again"
        assert trainer.trained == trained_by(await store.steps())


async def test_the_best_step_has_a_checkpoint_also_if_a_kill_came_before_it(tmp_path: Path) -> None:
    async def evaluate(steps: int) -> dict[str, float]:
        return {"eval/greedy": float(steps == 2)}

    async with SQLiteStore(tmp_path / "store.db") as store:
        for steps in (2, 4):
            config = changed(
                {"steps": steps, "evaluation": {"every": 1}, "checkpoints": {"keep": 1}}
            )
            await run(tmp_path, store, FakeTrainer(), config=config, evaluate=evaluate)
            if steps == 2:
                shutil.rmtree(tmp_path / "checkpoints" / "step-000001")
        best = FakeTrainer()
        await best.restore(tmp_path / "checkpoints" / "step-000001")
        assert best.trained == trained_by((await store.steps())[:2])


async def test_updates_between_checkpoints_are_repeated_from_their_rollouts(tmp_path: Path) -> None:
    sparse = changed({"steps": 3, "checkpoints": {"every": 2}})
    async with SQLiteStore(tmp_path / "store.db") as store:
        with pytest.raises(StoreError):
            await run(
                tmp_path, store, FakeTrainer(), log=FailingLog(store, commits=True), config=sparse
            )
        shutil.rmtree(tmp_path / "checkpoints" / "step-000001")
        trainer, collector = FakeTrainer(), ScriptedCollector(store)
        records = await run(tmp_path, store, trainer, collector=collector, config=sparse)
        assert [record.step for record in records] == [2]
        assert collector.ran == [rollout.id for rollout in of_step(2)]
        assert trainer.trained == trained_by(await store.steps())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]


@pytest.mark.parametrize("oversample", [1, 2])
async def test_an_update_whose_calls_were_pruned_is_not_repeated_without_them(
    tmp_path: Path, oversample: int
) -> None:
    config = changed({"algorithm": {"oversample": oversample}, "steps": 1})
    async with SQLiteStore(tmp_path / "store.db") as store:
        await run(tmp_path, store, FakeTrainer(), config=config)
        shutil.rmtree(tmp_path / "checkpoints" / "step-000000")
        await store.prune(time.time() + 1)
        collector = ScriptedCollector(store)
        with pytest.raises(StoreError, match="step 1 has no checkpoint"):
            await run(tmp_path, store, FakeTrainer(), collector=collector, config=config)
        assert collector.ran == [], "no runner would have run them yet"


class SlowDisk(FakeTrainer):
    """Writes a checkpoint only once the rollouts of so many steps have run."""

    def __init__(self, collector: ScriptedCollector, steps: int) -> None:
        super().__init__()
        self._collector = collector
        self._steps = steps

    async def snapshot(self) -> Callable[[Path], None]:
        write = await super().snapshot()

        def wait(folder: Path) -> None:
            while len(self._collector.ran) < self._steps * GROUPS * SIZE:
                time.sleep(0.001)
            write(folder)

        return wait


async def test_a_checkpoint_is_written_while_the_next_step_runs(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "store.db") as store:
        collector = ScriptedCollector(store)
        two = CONFIG.model_copy(update={"steps": 2})
        trainer = SlowDisk(collector, 2)
        await run(tmp_path, store, trainer, collector=collector, config=two)
        restored = FakeTrainer()
        await restored.restore(tmp_path / "checkpoints" / "step-000001")
        assert restored.trained == trainer.trained


async def test_a_step_does_not_wait_for_a_checkpoint_that_takes_longer(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "store.db") as store:
        collector = ScriptedCollector(store)
        trainer = SlowDisk(collector, 4)  # the first one is written during the fourth step
        with anyio.fail_after(30):
            await run(tmp_path, store, trainer, collector=collector)
        restored = FakeTrainer()
        await restored.restore(tmp_path / "checkpoints" / "step-000003")
        assert restored.trained == trainer.trained


HELD_OUT = {1: 0.2, 2: 0.9, 3: 0.5, 4: 0.4}


async def evaluated(steps: int) -> Metrics:
    return {"eval/greedy": HELD_OUT[steps]}


def evaluating(**sections: dict[str, JsonValue]) -> RunConfig:
    return changed({"evaluation": {"every": 1}, **sections})


async def test_the_best_checkpoint_is_kept_beside_the_last(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "store.db") as store:
        records = await run(tmp_path, store, FakeTrainer(), config=evaluating(), evaluate=evaluated)
    assert [record.metrics["eval/greedy"] for record in records] == list(HELD_OUT.values())
    assert find_best_step(records) == records[1]
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-000001", "step-000003"]


async def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    kept = evaluating(evaluation={}, checkpoints={"keep": 2})
    async with SQLiteStore(tmp_path / "store.db") as store:
        await run(tmp_path, store, FakeTrainer(), config=kept)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000002", "step-000003"]


@pytest.mark.parametrize(
    ("sections", "steps", "reason"),
    [
        ({"evaluation": {"every": 1, "patience": 1}}, 3, "no evaluation since step 2 was better"),
        ({"budget": {"tokens": 13}}, 2, "budget.tokens is spent: 24 of 13"),
        ({"budget": {"minutes": 1e-9}}, 1, "budget.minutes is spent"),
    ],
)
async def test_a_run_stops_early_and_goes_on_with_more(
    tmp_path: Path, sections: dict[str, dict[str, JsonValue]], steps: int, reason: str
) -> None:
    limited = evaluating(**sections)
    async with SQLiteStore(tmp_path / "store.db") as store:
        records = await run(tmp_path, store, FakeTrainer(), config=limited, evaluate=evaluated)
        assert len(records) == steps
        assert reason in (explain_stop(records, limited) or "")
        assert await run(tmp_path, store, FakeTrainer(), config=limited, evaluate=evaluated) == []
        more = await run(tmp_path, store, trainer := FakeTrainer(), config=CONFIG)
        assert [record.step for record in more] == list(range(steps, 4))
        assert trainer.trained == trained_by(await store.steps())


async def test_a_crash_at_the_commit_does_the_step_again(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "store.db") as store:
        crashed = FakeTrainer()
        with pytest.raises(StoreError):
            await run(tmp_path, store, crashed, log=FailingLog(store, commits=False))
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
            await run(tmp_path, store, FakeTrainer(), log=FailingLog(store, commits=True))
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
    assert "reward" not in record.metrics, "unknown, not 0"
    assert record.version == 0
    assert len(record.consumed) == 6


REFILLED = CONFIG.model_copy(
    update={"steps": 3, "algorithm": AlgorithmConfig(oversample=2)},
)
QUIET = {"g01", "g02", "g04", "g05", "g06", "g07"}
DRAWN = [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
"""Step by step: one of two speaks, then none of one, then the last; none of four; both."""


def numbers(record: StepRecord) -> tuple[int, ...]:
    return tuple(sorted({int(id_[1:3]) for id_ in record.consumed}))


async def test_equal_answers_are_warned_of_once_and_reasons_are_not_repeated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with SQLiteStore(tmp_path / "store.db") as store:
        collector = ScriptedCollector(store, silent=(), is_certain=True)
        records = await run(tmp_path, store, FakeTrainer(), collector=collector)
    assert [record.metrics["equal_answer_fraction"] for record in records] == [1, 1, 1, 1]
    assert caplog.text.count("equal answers in 2 of 2 groups: 2 x ") == 1

    caplog.clear()
    async with SQLiteStore(tmp_path / "other.db") as store:
        every = [f"g{group:02d}" for group in range(GROUPS * 4)]
        collector = ScriptedCollector(store, silent=every)
        await run(tmp_path / "other", store, FakeTrainer(), collector=collector)
    assert caplog.text.count("all rewards of a task are equal") == 1
    assert [n for n in range(1, 5) if f"step {n} trained nothing either" in caplog.text] == [
        2,
        3,
        4,
    ]


async def test_zero_signal_groups_are_refilled_up_to_the_limit_and_the_next_step_goes_on_from_there(
    tmp_path: Path,
) -> None:
    async with SQLiteStore(tmp_path / "store.db") as store:
        collector = ScriptedCollector(store, silent=QUIET)
        records = await run(tmp_path, store, FakeTrainer(), collector=collector, config=REFILLED)
    assert [numbers(record) for record in records] == DRAWN
    assert [r.metrics["groups"] for r in records] == [4, 4, 2]
    assert [r.metrics["zero_signal_fraction"] for r in records] == [0.5, 1, 0]
    assert [r.metrics["trained_rollouts"] for r in records] == [6, 0, 6]


@pytest.mark.parametrize("crash", ["at the checkpoint", "at the commit"])
async def test_a_refilled_step_is_drawn_again_as_it_was(tmp_path: Path, crash: str) -> None:
    async with SQLiteStore(tmp_path / "store.db") as store:
        broken = crash == "at the checkpoint"
        trainer = CannotSave(after_writing=False) if broken else FakeTrainer()
        log = store if broken else FailingLog(store, commits=False)
        first = ScriptedCollector(store, silent=QUIET)
        with pytest.raises((TrainerError, StoreError)):
            await run(tmp_path, store, trainer, collector=first, log=log, config=REFILLED)
        collector = ScriptedCollector(store, silent=QUIET)
        await run(tmp_path, store, FakeTrainer(), collector=collector, config=REFILLED)
        assert [numbers(record) for record in await store.steps()] == DRAWN
        assert not set(first.ran) & set(collector.ran), "rollouts were run twice"


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


UPDATES = CONFIG.model_copy(
    update={"tasks_per_step": GROUPS, "loop": LoopConfig(mini_batches=2, epochs=2)}
)


def groups_of(update: Sequence[str]) -> set[str]:
    return {generation.partition("-")[0] for generation in update}


async def test_each_epoch_has_an_update_per_mini_batch_of_whole_groups(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    async with SQLiteStore(tmp_path / "store.db") as store:
        records = await run(tmp_path, store, trainer, config=UPDATES)
    assert [record.version for record in records] == [4, 8, 8, 12]
    assert [record.metrics.get("updates") for record in records] == [4, 4, None, 4]
    for step, record in enumerate(r for r in records if r.step != SILENT_STEP):
        updates = trainer.trained[4 * step : 4 * step + 4]
        everything = sorted(generations_of(record.step))
        assert sorted(updates[0] + updates[1]) == sorted(updates[2] + updates[3]) == everything
        assert [len(groups_of(update)) for update in updates] == [1] * 4
        assert record.metrics["trained_tokens"] == 2 * 12, "once per epoch"
    weights = [len(s.logprobs) * s.weight for row in trainer.rows for s in row.segments]
    assert sum(weights) == pytest.approx(12), "the weights of each update sum to 1"


class DiesInUpdate(FakeTrainer):
    """Fails in an update, after the earlier ones of its step have changed the weights."""

    def __init__(self, update: int) -> None:
        super().__init__()
        self._left = update

    async def optim_step(self, adam: AdamStep) -> Metrics:
        if self._left == 0:
            raise TrainerError("killed")
        self._left -= 1
        return await super().optim_step(adam)


@pytest.mark.parametrize("update", [5, 6, 7])
async def test_a_step_killed_between_its_updates_is_redone_as_a_whole(
    tmp_path: Path, update: int
) -> None:
    whole = FakeTrainer()
    async with SQLiteStore(tmp_path / "whole.db") as store:
        await run(tmp_path / "whole", store, whole, config=UPDATES)
    async with SQLiteStore(tmp_path / "store.db") as store:
        with pytest.raises(TrainerError, match="killed"):
            await run(tmp_path, store, DiesInUpdate(update), config=UPDATES)
        trainer, collector = FakeTrainer(), ScriptedCollector(store)
        await run(tmp_path, store, trainer, collector=collector, config=UPDATES)
    assert trainer.trained == whole.trained, "every update once, in the same order"
    assert not {rollout.id for rollout in of_step(1)} & set(collector.ran)


class Poisoned(FakeTrainer):
    """Rejects an update."""

    def __init__(self, update: int, *, at: str) -> None:
        super().__init__()
        self._left = update
        self._at = at

    async def forward_backward(self, rows: Sequence[Row], loss: LossConfig) -> Metrics:
        self._left -= 1
        if self._left == -1 and self._at == "loss":
            raise NonFiniteUpdate("the loss is inf: advantages are too large")
        return await super().forward_backward(rows, loss)

    async def optim_step(self, adam: AdamStep) -> Metrics:
        if self._left == -1 and self._at == "gradient":
            self._gradient = []
            raise NonFiniteUpdate("the gradient's norm is nan")
        return await super().optim_step(adam)


@pytest.mark.parametrize("at", ["loss", "gradient"])
async def test_an_update_that_is_not_finite_is_skipped_counted_and_never_redone(
    tmp_path: Path, at: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Poisoned(1, at=at)
    async with SQLiteStore(tmp_path / "store.db") as store:
        records = await run(tmp_path, store, trainer)
        assert [record.step for record in await store.steps()] == [0, 1, 2, 3]
    assert [record.version for record in records] == [1, 1, 1, 2]
    assert [record.metrics.get("skipped_updates") for record in records] == [0, 1, None, 0]
    assert trainer.trained == [generations_of(0), generations_of(3)]
    assert "update skipped step=1" in caplog.text


async def test_old_log_probabilities_are_recomputed_once_before_several_updates(
    tmp_path: Path,
) -> None:
    for loop, expected in [(LoopConfig(), False), (LoopConfig(mini_batches=2), True)]:
        loss = LossConfig(old_logprobs="recomputed")
        config = CONFIG.model_copy(update={"steps": 1, "loss": loss, "loop": loop})
        trainer = FakeTrainer()
        async with SQLiteStore(tmp_path / f"{expected}.db") as store:
            await run(tmp_path, store, trainer, config=config)
        segments = [s for row in trainer.rows for s in row.segments]
        assert {s.old_logprobs is not None for s in segments} == {expected}
