"""Rollouts a second from prompt to trained weights, against TRL's GRPOTrainer.

    python bench/gpu/rollouts.py [--prompts 32] [--answer 64] [--steps 3]

The same model in bf16 with fp32 master weights, prompts, group size of 16, answer length, reward
and learning rate; full weights. A step samples every prompt 16 times and updates once. TRL
generates with transformers, as it does without vLLM. Each way does one step first, uncounted.
The whole path has agents with the OpenAI client, gateway, store and checkpoints besides engine and
trainer. Exits 1 if either is less than three times as fast as TRL.
"""

import argparse
import asyncio
import gc
import os
import sys
import tempfile
import time
from statistics import fmean

import common as gpu
import torch
from datasets import Dataset
from single_turn import digit_share, single_turn
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

import whet
from whet.config import AdamStep, LossConfig
from whet.demos.problems import problems
from whet.gateway.templates.chat_template import ChatTemplate
from whet.trainers.local import LocalTrainer
from whet.training.rows import normalize
from whet.types import Row

GROUP = 16
GOAL = 3.0
RATE = 1e-6


async def own(folder, prompts, answer: int, steps: int, device: str) -> tuple[float, float, dict]:
    gpu.forget_peak()
    capacity = 1 << (max(map(len, prompts)) + answer).bit_length()
    local = gpu.load(folder, device, max(1024, capacity * len(prompts) * GROUP))
    trainer = LocalTrainer(local.policy)
    template = ChatTemplate(folder)
    repeated = [prompt for prompt in prompts for _ in range(GROUP)]
    parts = {"sample": 0.0, "train": 0.0}

    def credit(rows: list[Row]) -> list[Row]:
        rewards = [
            digit_share(template.decode(row.tokens[row.segments[0].start :])) for row in rows
        ]
        credited: list[Row] = []
        for begin in range(0, len(rows), GROUP):
            mean = fmean(rewards[begin : begin + GROUP])
            for index in range(begin, begin + GROUP):
                credited.append(gpu.credited(rows[index], rewards[index] - mean))
        return normalize(credited, LossConfig(), rollouts=len(credited))

    async def step() -> None:
        began = time.perf_counter()
        rows = await local.sample(repeated, max_tokens=answer)
        parts["sample"] += time.perf_counter() - began
        began = time.perf_counter()
        await trainer.forward_backward(credit(rows), LossConfig())
        await trainer.optim_step(AdamStep(lr=RATE))
        gpu.synchronize()
        parts["train"] += time.perf_counter() - began

    await step()
    parts.update(sample=0.0, train=0.0)
    began = time.perf_counter()
    for _ in range(steps):
        await step()
    seconds = (time.perf_counter() - began) / steps
    await local.engine.close()
    return seconds, gpu.peak_gb(), {name: value / steps for name, value in parts.items()}


def by_trl(folder, prompts, answer: int, steps: int, device: str, micro: int) -> tuple:
    gc.collect()
    gpu.forget_peak()
    template = ChatTemplate(folder)
    texts = [template.decode_all(prompt) for prompt in prompts]
    rollouts = len(prompts) * GROUP
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            gpu.synchronize()
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            output_dir=directory,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=rollouts // micro,
            num_generations=GROUP,
            max_completion_length=answer,
            generation_kwargs={"min_new_tokens": answer},
            learning_rate=RATE,
            lr_scheduler_type="constant",
            beta=0.0,
            max_steps=steps + 1,
            bf16=device == "cuda",
            use_cpu=device == "cpu",
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=1000,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [digit_share(text) for text in completions],
            args=config,
            train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[Clock()],
        )
        trainer.train()
    return (ends[-1] - ends[0]) / steps, gpu.peak_gb()


def by_whole_path(folder, prompts: int, answer: int, steps: int, device: str) -> float:
    """Seconds of a step with agents in other processes, gateway, store and checkpoint."""
    os.environ["WHET_BENCH_TOKENS"] = str(answer)  # of processes that start from now on
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        result = whet.train(
            single_turn,
            problems("train", 500, 0),
            quiet=True,
            model=str(folder),
            dir=directory,
            steps=steps + 1,
            tasks_per_step=prompts,
            group_size=GROUP,
            engine={"device": device, "kv_tokens": 1024 * prompts * GROUP // 2},
            trainer={"weights": "full"},
            adam={"lr": RATE},
            runner={"concurrency": 512},
        )
    for step in result.steps:
        names = ("collect_seconds", "train_seconds", "step_seconds")
        print({name: round(step.metrics[name], 2) for name in names})
    return fmean(step.metrics["step_seconds"] for step in result.steps[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--micro", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    folder = gpu.model_folder(args.model)
    rollouts = args.prompts * GROUP
    gpu.head(f"{rollouts} rollouts a step, {args.answer} tokens each")
    prompts = gpu.prompts(folder, args.prompts)
    print(f"prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens")
    print(f"{'way':<16} {'rollouts/s':>10} {'step s':>8} {'times':>6} {'peak GB':>8}")
    seconds, peak, parts = asyncio.run(own(folder, prompts, args.answer, args.steps, args.device))
    split = ", ".join(f"{name} {value:.2f} s" for name, value in parts.items())
    print(f"{'whet':<16} {rollouts / seconds:>10.0f} {seconds:>8.2f} {'':>6} {peak:>8.1f}  {split}")
    gc.collect()
    whole = by_whole_path(folder, args.prompts, args.answer, args.steps, args.device)
    print(f"{'whet, whole path':<16} {rollouts / whole:>10.0f} {whole:>8.2f}", flush=True)
    gc.collect()
    micro = min(args.micro, rollouts)
    base, peak = by_trl(folder, prompts, args.answer, args.steps, args.device, micro)
    print(f"{'TRL':<16} {rollouts / base:>10.0f} {base:>8.2f} {1.0:>6.1f} {peak:>8.1f}")
    print(f"whet is {base / seconds:.1f} times as fast, the whole path {base / whole:.1f} times")
    return 0 if min(base / seconds, base / whole) >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
