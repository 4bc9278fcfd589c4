"""Training in several processes: the same gradients and weights as in one, over gloo on a CPU."""

import os
import random
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from support.models.tiny_llama import VOCABULARY, load, row_of
from whet.app.composition.trainers import open_trainer
from whet.config import AdamStep, LossConfig, resolve
from whet.errors import ConfigError, NonFiniteUpdate, TrainerError
from whet.models.huggingface import LocalPolicy
from whet.trainers.local import LocalTrainer
from whet.trainers.master_weights import OPTIMIZER, WEIGHTS, MasterWeights
from whet.trainers.parallel.data_parallel import (
    DataParallelTrainer,
    deal_rows,
    merge_metrics,
    reduce_gradient,
)
from whet.trainers.parallel.ranks import RankCommand, check_gpus
from whet.trainers.parallel.sharded import ShardedTrainer, count_bytes
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


@dataclass
class Opened:
    """A trainer, and the policy that samples from its weights."""

    trainer: LocalTrainer | ShardedTrainer
    policy: LocalPolicy

    @property
    def ranks(self) -> list[int]:
        """Process ids of the other ranks."""
        assert isinstance(self.trainer, DataParallelTrainer | ShardedTrainer)
        return [rank.pid for rank in self.trainer._ranks.others]

    def weights(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.policy.get_trainable().items()}

    async def gradient(self) -> list[Tensor | None]:
        """The gradient of all processes, of which a shard has its part.

        The next step sums copies once more, over nothing else.
        """
        trainer = self.trainer
        if isinstance(trainer, ShardedTrainer):
            return clone(trainer._part._shards)
        if isinstance(trainer, DataParallelTrainer):
            weights, command = trainer._weights, RankCommand(name="reduce_gradient")
            await trainer.run_in_thread(
                lambda: trainer._ranks.run_everywhere(
                    command, lambda: reduce_gradient(weights, rank=0)
                )
            )
        return clone(trainer._weights)


def clone(weights: MasterWeights) -> list[Tensor | None]:
    return [None if grad is None else grad.clone() for grad in weights.get_accumulated()]


@asynccontextmanager
async def opened(
    folder: Path, gpus: int, shard: str = "off", **settings: Any
) -> AsyncGenerator[Opened]:
    # Of adapters of rank 6 the last of four processes has nothing.
    sizes = {"gpus": gpus, "shard": shard, "lora_rank": 6, "lora_alpha": 12}
    trainer = {**sizes, **settings.pop("trainer", {})}
    config = resolve({"trainer": trainer, "engine": {"device": "cpu"}, **settings})
    async with open_trainer(config, folder) as (found, policy):
        assert isinstance(found, LocalTrainer | ShardedTrainer)
        assert isinstance(found, ShardedTrainer) == (shard == "on")
        assert isinstance(policy, LocalPolicy)
        yield Opened(found, policy)


async def train(opened: Opened, loss: LossConfig) -> dict[str, list[Any]]:
    """Three steps on different rows: losses, gradients and weights of each."""
    found: dict[str, list[Any]] = {"metrics": [], "gradients": [], "weights": []}
    for step in range(3):
        metrics = await opened.trainer.forward_backward(make_rows(step), loss)
        assert opened.trainer.take_log_ratios().keys() == {"c.0"}
        found["gradients"].append(await opened.gradient())
        found["metrics"].append({**metrics, **await opened.trainer.optim_step(ADAM)})
        found["weights"].append(opened.weights())
    return found


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "shard", "weights", "kl"),
    [
        (2, "off", "full", 0.1),
        (4, "off", "lora", 0.1),
        (2, "on", "full", 0.1),
        (4, "on", "lora", 0.1),
        (4, "on", "full", 0.0),
    ],
)
async def test_losses_gradients_and_weights_are_those_of_one_process(
    tiny_folder: Path, tmp_path: Path, gpus: int, shard: str, weights: str, kl: float
) -> None:
    loss = LossConfig(name="importance_sampling", kl=kl)
    # Small passes: ranks have different numbers of them.
    settings: dict[str, Any] = {
        "trainer": {"weights": weights, "micro_batch_tokens": 64},
        "loss": loss.model_dump(),
    }
    async with opened(tiny_folder, 1, **settings) as alone:
        expected = await train(alone, loss)
        await alone.trainer.save(tmp_path / "alone")
    async with opened(tiny_folder, gpus, shard, **settings) as together:
        found = await train(together, loss)
        assert await together.trainer.publish() == together.policy.version == 3
        await together.trainer.save(tmp_path / "together")
        await together.trainer.export(tmp_path / "model")
    assert any((tmp_path / "model").glob("*.safetensors"))
    for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        del ours["computed_tokens"], theirs["computed_tokens"]  # both may compute a prefix
        assert ours == pytest.approx(theirs, abs=1e-5)
    for ours, theirs in zip(found["gradients"], expected["gradients"], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert_close(one, other[: len(one)])
    for ours, theirs in zip(found["weights"], expected["weights"], strict=True):
        for name, weight in ours.items():
            assert_close(weight, theirs[name])
    for file in (WEIGHTS, OPTIMIZER):  # the moments hold the gradients of all ranks
        ours, theirs = (load_file(tmp_path / name / file) for name in ("together", "alone"))
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert_close(tensor, theirs[name])


@pytest.mark.slow
@pytest.mark.parametrize(("shard", "when"), [("off", "pass"), ("on", "pass"), ("on", "step")])
async def test_a_killed_process_ends_the_training_and_a_checkpoint_continues_it(
    tiny_folder: Path, tmp_path: Path, shard: str, when: str
) -> None:
    async with opened(tiny_folder, 1) as alone:
        expected = (await train(alone, PLAIN))["weights"][-1]
    async with opened(tiny_folder, 2, shard) as killed:
        trainer = killed.trainer
        await trainer.forward_backward(make_rows(0), PLAIN)
        await trainer.optim_step(ADAM)
        await trainer.save(tmp_path / "one")
        if when == "step":
            await trainer.forward_backward(make_rows(1), PLAIN)
        [rank] = killed.ranks
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(TrainerError, match=r"training process 1 of 2 ended \(SIGKILL\)"):
            await (
                trainer.forward_backward(make_rows(1), PLAIN)
                if when == "pass"
                else trainer.optim_step(ADAM)
            )
    # A checkpoint is the same of both layouts.
    async with opened(tiny_folder, 2, {"pass": shard, "step": "off"}[when]) as again:
        await again.trainer.restore(tmp_path / "one")
        assert again.policy.version == 1
        for step in (1, 2):
            await again.trainer.forward_backward(make_rows(step), PLAIN)
            await again.trainer.optim_step(ADAM)
        for name, weight in again.weights().items():
            assert_close(weight, expected[name])


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["off", "on"])
async def test_old_logprobs_and_refused_rows_are_those_of_one_process(
    tiny_folder: Path, tmp_path: Path, shard: str
) -> None:
    rows = make_rows()
    bad = row_of([1, 2], [3], [float("nan")], 1.0)
    large = row_of([1, 2], [3], [-1.0], 1e38, weight=1e30)
    async with opened(tiny_folder, 1) as alone:
        expected = await alone.trainer.recompute_logprobs(rows)
        await alone.trainer.forward_backward(rows[:1], PLAIN)
        gradient = await alone.gradient()
    async with opened(tiny_folder, 2, shard) as together:
        found = await together.trainer.recompute_logprobs(rows)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.tokens == theirs.tokens
            assert ours.segments[0].old_logprobs == pytest.approx(
                theirs.segments[0].old_logprobs, abs=1e-5
            )
        for odd in (bad, large):  # found before the pass, and in it
            with pytest.raises(NonFiniteUpdate):
                await together.trainer.forward_backward([*rows, odd], PLAIN)
        with pytest.raises(TrainerError, match="cannot read the checkpoint"):
            await together.trainer.restore(tmp_path)
        # One row for two processes, after failures: nothing of them is left.
        await together.trainer.forward_backward(rows[:1], PLAIN)
        for one, other in zip(await together.gradient(), gradient, strict=True):
            assert one is not None
            assert other is not None
            assert_close(one, other[: len(one)])


def test_the_memory_of_a_copy_counts_weights_gradients_and_moments(tiny_folder: Path) -> None:
    full, lora = load(tiny_folder, weights="full"), load(tiny_folder)
    size = sum(parameter.numel() for parameter in full.get_trainable().values())
    assert count_bytes(full) == 20 * size
    adapters = sum(parameter.numel() for parameter in lora.get_trainable().values())
    assert count_bytes(lora) == 4 * size + 20 * adapters


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shard": "on"}, "set gpus too"),
        ({"shard": "on", "gpus": 2, "compile": True}, "compile is not supported"),
        ({"shard": "on", "gpus": 2, "optimizer": "adamw_8bit"}, "optimizer is not supported"),
    ],
)
def test_what_a_sharded_model_does_not_support_is_an_error(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve({"trainer": settings})


@pytest.mark.parametrize(
    ("size", "found", "device", "message"),
    [
        (4, 2, "auto", "trainer.gpus is 4 but torch finds 2: set it to 2"),
        (4, 2, "cuda", "trainer.gpus is 4 but torch finds 2: set it to 2"),
        (2, 0, "cuda", "torch finds no GPU: use 'cpu' or 'auto'"),
    ],
)
def test_more_gpus_than_there_are_is_an_error_at_start(
    size: int, found: int, device: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_gpus(size, found, device=device)


def test_without_a_gpu_any_number_of_processes_trains_on_the_cpu() -> None:
    check_gpus(4, 0, device="auto")
    check_gpus(4, 2, device="cpu")


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_rows_are_dealt_by_the_tokens_to_compute(parts: int) -> None:
    rows = make_rows(groups=16)
    dealt = deal_rows(rows, parts)
    assert sorted(map(id, rows)) == sorted(id(row) for part in dealt for row in part)
    sizes = [sum(len(row.tokens) for row in part) for part in dealt]
    longest = max(len(row.tokens) for row in rows)
    assert max(sizes) - min(sizes) <= 0.3 * sum(sizes) / parts + 2 * longest


def test_fewer_rows_than_processes_leave_some_without_any() -> None:
    [row] = make_rows(groups=1, size=1)
    assert sorted(map(len, deal_rows([row], 4))) == [0, 0, 0, 1]
    assert deal_rows([], 2) == [[], []]


def test_metrics_of_parts_merge_to_those_of_all() -> None:
    parts = [
        {"loss": 1.0, "trained_tokens": 30.0, "computed_tokens": 50.0, "entropy": 2.0},
        {"loss": 2.0, "trained_tokens": 10.0, "computed_tokens": 20.0, "entropy": 6.0},
        {"loss": 0.0, "trained_tokens": 0.0, "computed_tokens": 0.0, "entropy": 0.0},
    ]
    expected = {"loss": 3.0, "trained_tokens": 40.0, "computed_tokens": 70.0, "entropy": 3.0}
    assert merge_metrics(parts) == pytest.approx(expected)
