"""Sampled tokens per second that the local trainer learns from, against a padded step.

    python bench/gpu/train.py [--groups 32] [--prompt 300] [--answer 64] [--model 1.5b]

Groups of 16 rows with one prompt, sampled by the local engine. The padded step is what one writes
with transformers: all rows padded to one length, log-probabilities of the answers, the same loss,
fused AdamW; in fp32 with bf16 autocast and in bf16, with all logits and with those of the answers
alone, in micro-batches of several sizes, of which the fastest counts. Exits 1 if the trainer is
less than three times as fast. `--model 135m`, `1.5b` and `7b` are random weights of those shapes.
How far sampler and trainer are apart is printed too: of answers sampled at temperature 1 from a
model that was never trained on such prompts, whose distributions are as wide as they get.
"""

import argparse
import asyncio
import gc
import sys
import time
from contextlib import suppress
from typing import Any

import common as gpu
import torch
from transformers import AutoModelForCausalLM

from whet.config import AdamStep, LossConfig
from whet.trainers.local import LocalTrainer
from whet.training.rows import normalize
from whet.types import Row

GROUP = 16
GOAL = 3.0


def padded(
    folder, rows: list[Row], micro: int, dtype: torch.dtype, device: str, *, all_logits: bool
) -> tuple:
    """Seconds and peak memory of a step as one writes it with transformers."""
    gc.collect()
    gpu.forget_peak()
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa"
    )
    model.to(device)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device == "cuda")
    autocast = torch.autocast(device, torch.bfloat16, enabled=dtype == torch.float32)

    def step() -> None:
        for begin in range(0, len(rows), micro):
            some = rows[begin : begin + micro]
            width = max(len(row.tokens) for row in some)
            filled = [[*row.tokens, *[0] * (width - len(row.tokens))] for row in some]
            ids = torch.tensor(filled, device=device)
            length = torch.tensor([[len(row.tokens)] for row in some], device=device)
            start = torch.tensor([[row.segments[0].start] for row in some], device=device)
            column = torch.arange(width, device=device)
            kept = column[0 if all_logits else min(r.segments[0].start for r in some) - 1 : -1]
            with autocast:
                mask = (column < length).long()
                logits = model(ids, attention_mask=mask, logits_to_keep=kept).logits
            wanted = ids[:, kept + 1, None]
            logp = logits.float().log_softmax(-1).gather(2, wanted)[..., 0]
            answer = (kept + 1 >= start) & (kept + 1 < length)
            ratio = (logp - logp.detach()).exp()
            (-(ratio * answer).sum() / (answer.sum() * len(rows) / micro)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()

    step()
    return gpu.timed(step, 2), gpu.peak_gb()


async def own(folder, prompts, answer: int, device: str, **settings: object) -> tuple:
    """Rows sampled by the engine, and a step of the trainer on them."""
    gc.collect()
    capacity = 1 << (len(prompts[0]) + answer).bit_length()
    local = gpu.load(folder, device, max(1024, capacity * len(prompts)), **settings)
    rows = await local.sample(prompts, max_tokens=answer)
    await local.engine.close()
    policy = local.policy
    del local
    gc.collect()
    gpu.forget_peak()
    trainer = LocalTrainer(policy)
    dealt = [gpu.credited(row, 1.0 if index % 2 else -1.0) for index, row in enumerate(rows)]
    weighed = normalize(dealt, LossConfig(), rollouts=len(dealt))

    async def step() -> dict[str, float]:
        metrics = await trainer.forward_backward(weighed, LossConfig())
        await trainer.optim_step(AdamStep(lr=1e-6))
        return dict(metrics)

    first = await step()
    seconds = float("inf")
    for _ in range(3):
        gpu.synchronize()
        began = time.perf_counter()
        await step()
        gpu.synchronize()
        seconds = min(seconds, time.perf_counter() - began)
    return rows, seconds, gpu.peak_gb(), first


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=300)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--weights", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--micro", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    folder = gpu.model_folder(args.model)
    gpu.head(
        f"a step on {args.groups} groups of {GROUP} rows, {args.prompt} + {args.answer} tokens"
    )
    some = gpu.prompts(folder, args.groups, length=args.prompt)
    prompts = [p for p in some for _ in range(GROUP)]
    weights = gpu.weights_in(folder)
    trained = len(prompts) * args.answer

    def line(way: str, seconds: float, computed: float, peak: float, operations: int = 6) -> None:
        mfu = operations * weights * computed / seconds / gpu.PEAK_FLOPS
        print(
            f"{way:<40} {trained / seconds:>10,.0f} {computed / seconds:>11,.0f} {mfu:>6.1%}"
            f" {peak:>8.1f} {seconds:>8.3f}",
            flush=True,
        )

    print(
        f"{'way':<40} {'trained/s':>10} {'computed/s':>11} {'MFU':>6} {'peak GB':>8} {'step s':>8}"
    )
    metrics: dict[str, dict[str, float]] = {}
    times: dict[str, float] = {}
    rows: list[Row] = []
    for kind in args.weights:
        rows, times[kind], peak, metrics[kind] = asyncio.run(
            own(folder, prompts, args.answer, args.device, weights=kind)
        )
        # The gradients of frozen weights, a third of the operations, are not computed.
        operations = 6 if kind == "full" else 4
        line(f"whet, {kind}", times[kind], metrics[kind]["computed_tokens"], peak, operations)
    computed = sum(len(row.tokens) for row in rows)
    best = float("inf")
    for dtype, all_logits, name in (
        (torch.float32, True, "autocast"),
        (torch.bfloat16, True, "bf16"),
        (torch.bfloat16, False, "bf16, answers' logits"),
    ):
        for micro in args.micro:
            with suppress(torch.OutOfMemoryError):
                step, peak = padded(folder, rows, micro, dtype, args.device, all_logits=all_logits)
                line(f"padded, {name}, {micro} rows", step, computed, peak)
                best = min(best, step)
    for kind, seconds in times.items():
        gap = metrics[kind]["logprob_gap"]
        print(f"{kind}: {best / seconds:.1f} times the fastest padded step")
        print(f"{kind}: mean |log p(trainer) - log p(sampler)| {gap:.5f}")
    kept = best / min(times.values()) >= GOAL
    print("the goal is kept" if kept else "the goal is missed")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
