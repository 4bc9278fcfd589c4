"""A sharded model (FSDP2) against a whole one: the same steps, their time and memory.

    python bench/gpu/shards.py [--model 135m] [--gpus 1] [--weights full,lora]

Three steps on the same rows by the trainer of one process and by shards on `--gpus` GPUs, over NCCL
(gloo on a CPU). With one GPU the shard is the whole, and NCCL has one rank: what is checked is the
path, not its scaling. Exits 1 if losses, norms of gradients or weights differ by more than 1e-5 in
fp32, or if a checkpoint of the shards does not restore the same weights. `--model 135m`, `1.5b` and
`7b` are random weights of those shapes.
"""

import argparse
import asyncio
import gc
import random
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import common as gpu
import torch
from torch import Tensor
from torch import distributed as dist

from whet.app.composition.trainers import open_trainer
from whet.config import AdamStep, LossConfig, RunConfig, resolve
from whet.models.huggingface import LocalPolicy
from whet.protocols import TrainingBackend
from whet.trainers.parallel.ranks import RankAddress, RankGroup, disconnect
from whet.trainers.parallel.sharded import ModelShard, ShardedTrainer
from whet.types import GenerationId, Row, SampledSegment

LOSS = LossConfig(name="importance_sampling")
ADAM = AdamStep(lr=1e-4)
TOLERANCE = 1e-5


class Result(NamedTuple):
    """The result of three steps."""

    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]
    seconds: float
    """Of a step, without the first."""
    gigabytes: float
    """Peak on the first GPU."""


def make_rows(count: int, length: int, vocabulary: int, seed: int) -> list[Row]:
    """Groups of 8 rows with one prompt."""
    source = random.Random(seed)

    def draw(n: int) -> tuple[int, ...]:
        return tuple(source.randrange(vocabulary) for _ in range(n))

    rows: list[Row] = []
    for group in range(count // 8):
        prompt = draw(length // 2)
        for index in range(8):
            sampled = draw(source.randint(length // 4, length // 2))
            size = len(sampled)
            segment = SampledSegment(
                generation=GenerationId(f"{group}.{index}.0"),
                start=len(prompt),
                logprobs=(-11.0,) * size,
                versions=(0,) * size,
                advantages=(source.uniform(-1, 1),) * size,
                weight=1e-3,
                temperature=1.0,
                top_p=1.0,
                top_k=0,
            )
            rows.append(Row((*prompt, *sampled), (segment,), rollout=f"r{index}", group=f"{group}"))
    return rows


@asynccontextmanager
async def shards(
    config: RunConfig, folder: Path, gpus: int
) -> AsyncGenerator[tuple[TrainingBackend, LocalPolicy]]:
    """The trainer of a sharded model; of one process by hand, which the config does not offer."""
    if gpus > 1:
        async with open_trainer(config, folder) as (trainer, policy):
            assert isinstance(policy, LocalPolicy)
            yield trainer, policy
        return
    assert config.trainer.kind == "local"

    def load() -> LocalPolicy:
        assert config.trainer.kind == "local"
        return LocalPolicy(folder, config.trainer, device=config.engine.device, seed=config.seed)

    policy, whole = load(), load()
    with tempfile.TemporaryDirectory() as place:
        ranks = RankGroup(RankAddress(0, 1, Path(place) / "rendezvous"), [])
        part = ranks.connect(
            policy.device, lambda: ModelShard(policy, ranks.address, whole=whole), shard=True
        )
        print(f"  {dist.get_backend()}, {dist.get_world_size()} rank, on {policy.device}")
        try:
            yield ShardedTrainer(part, whole, ranks), whole
        finally:
            disconnect()


async def run(trainer: TrainingBackend, policy: LocalPolicy, steps: list[list[Row]]) -> Result:
    metrics: list[dict[str, float]] = []
    took: list[float] = []
    gpu.forget_peak()
    for rows in steps:
        began = time.perf_counter()
        found = await trainer.forward_backward(rows, LOSS)
        metrics.append({**found, **await trainer.optim_step(ADAM)})
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    weights = {name: p.detach().cpu().clone() for name, p in policy.get_trainable().items()}
    return Result(metrics, weights, sum(took[1:]) / len(took[1:]), gpu.peak_gb())


async def compare(args: argparse.Namespace, weights: str, precision: str) -> bool:
    folder = gpu.model_folder(args.model)
    settings: dict[str, Any] = {"weights": weights, "precision": precision}
    settings["micro_batch_tokens"] = 8192
    engine: dict[str, Any] = {"device": args.device}
    plain = resolve({"trainer": settings, "engine": engine})
    many = {**settings, "gpus": args.gpus, "shard": "on"} if args.gpus > 1 else settings
    async with open_trainer(plain, folder) as (trainer, policy):
        assert isinstance(policy, LocalPolicy)
        vocabulary = policy.vocabulary
        steps = [make_rows(args.rows, args.length, vocabulary, seed) for seed in range(3)]
        one = await run(trainer, policy, steps)
    del trainer, policy
    gc.collect()
    with tempfile.TemporaryDirectory() as saved:
        async with shards(resolve({"trainer": many, "engine": engine}), folder, args.gpus) as found:
            trainer, whole = found
            other = await run(trainer, whole, steps)
            await trainer.save(Path(saved) / "checkpoint")
            await trainer.forward_backward(steps[0], LOSS)
            await trainer.optim_step(ADAM)
            await trainer.restore(Path(saved) / "checkpoint")
            restored = {n: p.detach().cpu().clone() for n, p in whole.get_trainable().items()}
            await trainer.export(Path(saved) / "model")
    del trainer, whole, found
    gc.collect()
    return judge(weights, precision, one, other, restored)


def judge(
    weights: str, precision: str, one: Result, other: Result, restored: dict[str, Tensor]
) -> bool:
    """Print how far both are apart, and return whether that is little enough."""
    pairs = list(zip(one.metrics, other.metrics, strict=True))
    loss = max(abs(a["loss"] - b["loss"]) for a, b in pairs)
    norm = max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in pairs)
    weight = max((one.weights[n] - w).abs().max().item() for n, w in other.weights.items())
    same = all(torch.equal(other.weights[name], weight) for name, weight in restored.items())
    tolerance = TOLERANCE if precision == "fp32" else 1e-2
    passed = same and max(loss, norm, weight) <= tolerance
    print(
        f"{weights:<5} {precision}: loss {loss:.1e}, norm {norm:.1e}, weights {weight:.1e} apart; "
        f"restored {'the same' if same else 'OTHER'} weights; "
        f"a step {one.seconds:.3f} s whole, {other.seconds:.3f} s sharded; "
        f"peak {one.gigabytes:.1f} and {other.gigabytes:.1f} GB: {'PASS' if passed else 'FAIL'}"
    )
    return passed


async def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="135m")
    parser.add_argument("--gpus", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--weights", default="full,lora")
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    gpu.head(f"sharded training of {args.model} on {args.gpus} of {torch.cuda.device_count()} GPUs")
    passed = [
        await compare(args, weights, precision)
        for weights in args.weights.split(",")
        for precision in args.precisions.split(",")
    ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
