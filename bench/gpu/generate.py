"""Sampled tokens per second of the local engine, against transformers' `model.generate`.

    python bench/gpu/generate.py [--batch 256 1024] [--tokens 128]

The same model, prompts and number of sampled tokens, in bf16, in turns in one process. Prompts come
in groups of 16 equal ones. Every request is one asyncio task, as the gateway would ask. Exits 1 if
the engine is less than four times as fast at any batch.
"""

import argparse
import asyncio
import gc
import sys
import time
from collections.abc import Sequence
from typing import Any

import common as gpu
import torch
from transformers import AutoModelForCausalLM

from whet.types import Row

GROUP = 16
GOAL = 4.0


def by_generate(folder, prompts: Sequence[Sequence[int]], tokens: int, device: str) -> tuple:
    gpu.forget_peak()
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model.to(device)
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)

    def generate(new: int) -> None:
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                min_new_tokens=new,
                max_new_tokens=new,
                pad_token_id=0,
            )
        assert out.shape[1] == width + new

    generate(4)
    seconds = gpu.timed(lambda: generate(tokens), 2)
    return seconds, gpu.peak_gb()


async def by_engine(folder, prompts, tokens: int, device: str, **settings: object) -> tuple:
    gpu.forget_peak()
    capacity = 1 << (max(map(len, prompts)) + tokens).bit_length()
    local = gpu.load(folder, device, max(1024, capacity * len(prompts)), **settings)
    began = time.perf_counter()
    await local.sample(prompts, max_tokens=tokens)
    first = time.perf_counter() - began
    seconds = float("inf")
    rows: Sequence[Row] = ()
    for _ in range(2):
        local.policy.revision += 1  # as after a training step: no prefix is left from before
        began = time.perf_counter()
        rows = await local.sample(prompts, max_tokens=tokens)
        seconds = min(seconds, time.perf_counter() - began)
    assert all(row.trained_tokens == tokens for row in rows)
    await local.engine.close()
    return seconds, gpu.peak_gb(), first


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--weights", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    folder = gpu.model_folder(args.model)
    gpu.head("tokens sampled per second")
    print("batch  prompt  way                    tokens/s   times   peak GB   first run s")
    kept = True
    for batch in args.batch:
        some = gpu.prompts(folder, max(1, batch // GROUP))
        prompts = [p for p in some for _ in range(GROUP)][:batch]
        length = f"{len(min(prompts, key=len))}-{len(max(prompts, key=len))}"

        base, peak = by_generate(folder, prompts, args.tokens, args.device)
        rate = batch * args.tokens
        print(
            f"{batch:>5}  {length:>6}  {'model.generate':<20} {rate / base:>10,.0f}  {1:6.1f}"
            f"  {peak:8.1f}",
            flush=True,
        )
        for kind in args.weights:
            way = f"whet, {kind}"
            gc.collect()
            own, peak, first = asyncio.run(
                by_engine(folder, prompts, args.tokens, args.device, weights=kind)
            )
            print(
                f"{batch:>5}  {length:>6}  {way:<20} {rate / own:>10,.0f}  {base / own:6.1f}"
                f"  {peak:8.1f}  {first:12.1f}",
                flush=True,
            )
            kept &= kind != "full" or base / own >= GOAL
    print("the goal is kept" if kept else f"less than {GOAL} times")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
