"""The contract of every trainer. A new trainer is done when it passes this file."""

import math
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from support.models.tiny_llama import load, row_of
from support.servers.tinker_serving import MARKS, open_tinker
from whet.config import AdamStep, LossConfig
from whet.errors import TrainerError
from whet.protocols import TrainingBackend
from whet.trainers.fake import FakeTrainer
from whet.trainers.local import LocalTrainer
from whet.types import Row

pytestmark = pytest.mark.anyio

LOSS = LossConfig()
ADAM = AdamStep(lr=1e-2)


def local(folder: Path) -> TrainingBackend:
    return LocalTrainer(load(folder), threads=1)


def fake(folder: Path) -> TrainingBackend:
    return FakeTrainer()


Build = Callable[[], Awaitable[TrainingBackend]]


@pytest.fixture(params=[local, fake, pytest.param("tinker", marks=MARKS)])
def build(request: pytest.FixtureRequest, tiny_folder: Path) -> Build:
    async def made() -> TrainingBackend:
        if request.param == "tinker":
            from whet.trainers.tinker import TinkerTrainer

            return TinkerTrainer(await open_tinker(request.getfixturevalue("tinker")))
        return request.param(tiny_folder)

    return made


@pytest.fixture
async def trainer(build: Build) -> TrainingBackend:
    return await build()


def rows(advantage: float = 1.0, *, logprob: float = -5.0, weight: float = 0.25) -> list[Row]:
    sequences = [([1, 2, 3], [4, 5]), ([1, 2, 9], [8, 7])]
    return [row_of(p, t, [logprob] * 2, advantage, weight=weight) for p, t in sequences]


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_log_ratios_are_taken_once_by_generation(trainer: TrainingBackend) -> None:
    [row] = rows()[:1]
    metrics = await trainer.forward_backward([row], LOSS)
    [segment] = row.segments
    taken = trainer.take_log_ratios()
    assert set(taken) == {segment.generation}
    found = taken[segment.generation]
    assert len(found) == len(segment.logprobs)
    gap = sum(map(abs, found)) / len(found)
    assert gap == pytest.approx(metrics.get("logprob_gap", 0.0), abs=1e-4)
    assert trainer.take_log_ratios() == {}


async def test_a_step_raises_the_version(trainer: TrainingBackend) -> None:
    assert await trainer.publish() == 0
    await trainer.forward_backward(rows(), LOSS)
    await trainer.forward_backward(rows(-1.0), LOSS)
    assert await trainer.publish() == 0
    await trainer.optim_step(ADAM)
    assert await trainer.publish() == 1
    assert await trainer.publish() == 1


async def test_metrics_are_finite_and_count_what_is_trained(trainer: TrainingBackend) -> None:
    metrics = {
        **await trainer.forward_backward(rows(), LOSS),
        **await trainer.optim_step(ADAM),
    }
    assert metrics["trained_tokens"] == 4
    assert {"loss", "grad_norm"} <= set(metrics)
    assert all(map(math.isfinite, metrics.values()))


async def test_no_rows_are_no_gradient(trainer: TrainingBackend) -> None:
    metrics = await trainer.forward_backward([], LOSS)
    assert metrics["trained_tokens"] == metrics["loss"] == 0
    assert all(map(math.isfinite, metrics.values()))


@pytest.mark.parametrize(
    "bad",
    [
        {"advantage": math.nan},
        {"advantage": math.inf},
        {"logprob": -math.inf},
        {"weight": math.nan},
    ],
    ids=str,
)
async def test_numbers_that_are_none_are_refused(
    trainer: TrainingBackend, bad: dict[str, float]
) -> None:
    with pytest.raises(TrainerError, match="finite"):
        await trainer.forward_backward([*rows(), *rows(**bad)], LOSS)
    assert await trainer.publish() == 0


async def test_a_checkpoint_is_restored(build: Build, tmp_path: Path) -> None:
    first, second = await build(), await build()
    await first.forward_backward(rows(), LOSS)
    await first.optim_step(ADAM)
    await first.save(tmp_path / "deep" / "one")
    await second.restore(tmp_path / "deep" / "one")
    assert await second.publish() == 1
    assert names(tmp_path / "deep") == ["one"]


async def test_a_snapshot_is_of_its_moment_whenever_it_is_written(
    build: Build, tmp_path: Path
) -> None:
    trainer, other = await build(), await build()
    first = await trainer.snapshot()
    before = await trainer.forward_backward(rows(), LOSS)
    second = await trainer.snapshot()
    await trainer.optim_step(ADAM)
    for name, write in {"second": second, "first": first}.items():
        write(tmp_path / name)
        await other.restore(tmp_path / name)
        assert await other.publish() == 0
        assert await other.forward_backward(rows(), LOSS) == pytest.approx(before)


async def test_a_folder_is_saved_over(build: Build, tmp_path: Path) -> None:
    trainer, other = await build(), await build()
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "of another time").touch()
    await trainer.save(tmp_path / "one")
    await trainer.optim_step(ADAM)
    await trainer.save(tmp_path / "one")
    assert not (tmp_path / "one" / "of another time").exists()
    await other.restore(tmp_path / "one")
    assert await other.publish() == 1


async def test_restoring_goes_back(trainer: TrainingBackend, tmp_path: Path) -> None:
    await trainer.save(tmp_path / "one")
    await trainer.forward_backward(rows(), LOSS)
    await trainer.optim_step(ADAM)
    await trainer.restore(tmp_path / "one")
    assert await trainer.publish() == 0


async def test_an_invalid_checkpoint_is_refused(trainer: TrainingBackend, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="missing"):
        await trainer.restore(tmp_path / "missing")
    await trainer.save(tmp_path / "broken")
    for file in (tmp_path / "broken").iterdir():
        file.write_bytes(b"{")
    with pytest.raises(TrainerError, match="broken"):
        await trainer.restore(tmp_path / "broken")
    assert await trainer.publish() == 0


async def test_an_export_is_a_folder_with_something_in_it(
    trainer: TrainingBackend, tmp_path: Path
) -> None:
    await trainer.export(tmp_path / "model")
    assert names(tmp_path / "model")
    assert names(tmp_path) == ["model"]
