"""When checkpoints are written, and by which thread old ones are deleted."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from whet.config import resolve
from whet.trainers.fake import FakeTrainer
from whet.training.checkpoints import MAX_SHARE, QUICK_S, Checkpoints
from whet.types import StepRecord

pytestmark = pytest.mark.anyio


class SlowTrainer(FakeTrainer):
    """A trainer whose checkpoints take so many seconds of its own clock to write."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    async def snapshot(self) -> Callable[[Path], None]:
        write = await super().snapshot()

        def write_slowly(folder: Path) -> None:
            self.now += self.seconds
            write(folder)

        return write_slowly


def records(count: int) -> list[StepRecord]:
    return [
        StepRecord(step=n, version=n + 1, checkpoint=f"step-{n:06d}", consumed=(), metrics={})
        for n in range(count)
    ]


async def count_written(folder: Path, trainer: SlowTrainer, *, step_seconds: float) -> int:
    """Run twenty steps and count their checkpoints."""
    config = resolve({"checkpoints": {"keep": 100}})
    async with Checkpoints(folder, trainer, config, clock=trainer.clock) as checkpoints:
        for count in range(1, 21):
            await checkpoints.save(records(count))
            await checkpoints.wait()
            trainer.now += step_seconds
    return sum((folder / record.checkpoint).is_dir() for record in records(20))


async def test_a_quick_checkpoint_is_written_after_every_step(tmp_path: Path) -> None:
    assert await count_written(tmp_path, SlowTrainer(QUICK_S / 2), step_seconds=0.0) == 20


async def test_a_slow_checkpoint_takes_a_small_share_of_the_time(tmp_path: Path) -> None:
    slow = SlowTrainer(4 * QUICK_S)
    rarely = await count_written(tmp_path / "a", slow, step_seconds=1.1 * slow.seconds / MAX_SHARE)
    assert rarely == 20
    often = await count_written(tmp_path / "b", slow, step_seconds=slow.seconds)
    assert often == 5  # one in five steps' time, of which it takes one itself


async def test_old_checkpoints_are_deleted_in_the_thread_that_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set[int]()
    monkeypatch.setattr(
        "whet.training.checkpoints.shutil.rmtree",
        lambda folder, **_: threads.add(threading.get_ident()),
    )
    async with Checkpoints(tmp_path, FakeTrainer(), resolve({})) as checkpoints:
        for count in range(1, 4):
            await checkpoints.save(records(count))
    assert threads
    assert threading.get_ident() not in threads
