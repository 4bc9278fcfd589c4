"""Training in several processes: the same gradients and weights as in one, over gloo on a CPU."""

import os
import random
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.tiny_llama import VOCABULARY, row_of
from whet.app.composition.trainers import open_trainer
from whet.config import AdamStep, LossConfig, resolve
from whet.errors import NonFiniteUpdate, TrainerError
from whet.trainers.data_parallel import DataParallelTrainer, deal, merge_metrics, reduce_gradient
from whet.trainers.local import LocalTrainer
from whet.trainers.ranks import RankCommand
from whet.types import Row

pytestmark = pytest.mark.anyio

PLAIN = LossConfig(name="importance_sampling")
ADAM = AdamStep(lr=1e-3)


def make_rows(seed: int = 0, groups: int = 4, size: int = 4) -> list[Row]:
    """Groups of rows that share a prompt, of different lengths."""
    source = random.Random(seed)

    def tokens(least: int, most: int) -> list[int]:
        return [source.randrange(VOCABULARY) for _ in range(source.randint(least, most))]

    rows: list[Row] = []
    for _ in range(groups):
        prompt = tokens(3, 9)
        for _ in range(size):
            sampled = tokens(2, 12)
            logprobs = [source.uniform(-5, -2) for _ in sampled]
            rows.append(row_of(prompt, sampled, logprobs, source.uniform(-1, 1), weight=0.1))
    return rows


@asynccontextmanager
async def opened(folder: Path, gpus: int, **settings: Any) -> AsyncGenerator[LocalTrainer]:
    trainer = {"gpus": gpus, "lora_rank": 4, "lora_alpha": 8, **settings.pop("trainer", {})}
    config = resolve({"trainer": trainer, "engine": {"device": "cpu"}, **settings})
    async with open_trainer(config, folder) as (found, _):
        assert isinstance(found, LocalTrainer)
        yield found


async def sum_gradient(trainer: LocalTrainer) -> list[Tensor | None]:
    """The gradient of all processes. The next step sums once more, over nothing else."""
    if isinstance(trainer, DataParallelTrainer):
        weights = trainer._weights
        await trainer._in_thread(
            lambda: trainer._run_together(
                RankCommand(name="reduce"), lambda: reduce_gradient(weights, rank=0)
            )
        )
    return [None if grad is None else grad.clone() for grad in trainer._weights.accumulated()]


async def train(trainer: LocalTrainer, loss: LossConfig) -> dict[str, list[Any]]:
    """Three steps on different rows: losses, gradients and weights of each."""
    found: dict[str, list[Any]] = {"metrics": [], "gradients": [], "weights": []}
    for step in range(3):
        metrics = await trainer.forward_backward(make_rows(step), loss)
        assert trainer.take_log_ratios().keys() == {"c.0"}
        found["gradients"].append(await sum_gradient(trainer))
        found["metrics"].append({**metrics, **await trainer.optim_step(ADAM)})
        parameters = trainer._policy.trainable()
        found["weights"].append({n: p.detach().clone() for n, p in parameters.items()})
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "weights", "kl"), [(2, "lora", 0.0), (4, "lora", 0.1), (2, "full", 0.1)]
)
async def test_losses_gradients_and_weights_are_those_of_one_process(
    tiny_folder: Path, gpus: int, weights: str, kl: float
) -> None:
    loss = LossConfig(name="importance_sampling", kl=kl)
    settings = {"trainer": {"weights": weights}, "loss": loss.model_dump()}
    async with opened(tiny_folder, 1, **settings) as alone:
        expected = await train(alone, loss)
    async with opened(tiny_folder, gpus, **settings) as together:
        found = await train(together, loss)
        assert await together.publish() == 3
    for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        del ours["computed_tokens"], theirs["computed_tokens"]  # both may compute a prefix
        assert ours == pytest.approx(theirs, abs=1e-5)
    for ours, theirs in zip(found["gradients"], expected["gradients"], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    for ours, theirs in zip(found["weights"], expected["weights"], strict=True):
        for name, weight in ours.items():
            torch.testing.assert_close(weight, theirs[name], atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before a pass", "before a step"])
async def test_a_killed_process_ends_the_training_and_a_checkpoint_continues_it(
    tiny_folder: Path, tmp_path: Path, when: str
) -> None:
    async with opened(tiny_folder, 1) as alone:
        expected = (await train(alone, PLAIN))["weights"][-1]
    async with opened(tiny_folder, 2) as trainer:
        assert isinstance(trainer, DataParallelTrainer)
        await trainer.forward_backward(make_rows(0), PLAIN)
        await trainer.optim_step(ADAM)
        await trainer.save(tmp_path / "one")
        if when == "before a step":
            await trainer.forward_backward(make_rows(1), PLAIN)
        [rank] = trainer._ranks.others
        os.kill(rank.pid, signal.SIGKILL)
        is_pass = when == "before a pass"
        with pytest.raises(TrainerError, match=r"training process 1 of 2 ended \(SIGKILL\)"):
            await (
                trainer.forward_backward(make_rows(1), PLAIN)
                if is_pass
                else trainer.optim_step(ADAM)
            )
    async with opened(tiny_folder, 2) as again:
        await again.restore(tmp_path / "one")
        for step in (1, 2):
            await again.forward_backward(make_rows(step), PLAIN)
            await again.optim_step(ADAM)
        parameters = again._policy.trainable()
        for name, weight in parameters.items():
            torch.testing.assert_close(weight.detach(), expected[name], atol=1e-5, rtol=0)


@pytest.mark.slow
async def test_old_logprobs_and_refused_rows_are_those_of_one_process(tiny_folder: Path) -> None:
    rows = make_rows()
    async with opened(tiny_folder, 1) as alone:
        expected = await alone.recompute_logprobs(rows)
    async with opened(tiny_folder, 2) as trainer:
        found = await trainer.recompute_logprobs(rows)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.tokens == theirs.tokens
            assert ours.segments[0].old_logprobs == pytest.approx(
                theirs.segments[0].old_logprobs, abs=1e-5
            )
        bad = row_of([1, 2], [3], [float("nan")], 1.0)
        with pytest.raises(NonFiniteUpdate):
            await trainer.forward_backward([*rows, bad], PLAIN)
        # One row for two processes, after a failure: nothing of it is left.
        await trainer.forward_backward(rows[:1], PLAIN)
        shared = await sum_gradient(trainer)
    async with opened(tiny_folder, 1) as alone:
        await alone.forward_backward(rows[:1], PLAIN)
        for one, other in zip(shared, await sum_gradient(alone), strict=True):
            assert one is not None
            assert other is not None
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_rows_are_dealt_by_the_tokens_to_compute(parts: int) -> None:
    rows = make_rows(groups=16)
    dealt = deal(rows, parts)
    assert sorted(map(id, rows)) == sorted(id(row) for part in dealt for row in part)
    sizes = [sum(len(row.tokens) for row in part) for part in dealt]
    longest = max(len(row.tokens) for row in rows)
    assert max(sizes) - min(sizes) <= 0.3 * sum(sizes) / parts + 2 * longest


def test_fewer_rows_than_processes_leave_some_without_any() -> None:
    [row] = make_rows(groups=1, size=1)
    assert sorted(map(len, deal([row], 4))) == [0, 0, 0, 1]
    assert deal([], 2) == [[], []]


def test_metrics_of_parts_merge_to_those_of_all() -> None:
    parts = [
        {"loss": 1.0, "trained_tokens": 30.0, "computed_tokens": 50.0, "entropy": 2.0},
        {"loss": 2.0, "trained_tokens": 10.0, "computed_tokens": 20.0, "entropy": 6.0},
        {"loss": 0.0, "trained_tokens": 0.0, "computed_tokens": 0.0, "entropy": 0.0},
    ]
    expected = {"loss": 3.0, "trained_tokens": 40.0, "computed_tokens": 70.0, "entropy": 3.0}
    assert merge_metrics(parts) == pytest.approx(expected)
