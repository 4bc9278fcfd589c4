"""A real model learns a real tool: SmolLM2-135M and the calculator of the demo, on one GPU.

    python bench/gpu/learn.py [--dialogues 384] [--until 0.12] [--steps 40] [--out results]

Three rows: the model as it is, after a short supervised warm-up on generated dialogues, and after
RL with GRPO on top of it. The warm-up goes over the dialogues until its loss is low enough that
some samples are right, and no further: a model that is always right leaves RL nothing to do. RL
is `whet.train` with the demo's own agent: the OpenAI client, gateway, store, rows, trainer.
Accuracy is of held-out problems, whose numbers are in no training problem.
Exits 1 if RL adds less than 25 points to the warm-up.
"""

import argparse
import asyncio
import json
import random
import shutil
import sys
import time
from pathlib import Path
from statistics import fmean

import common as gpu

import whet
from whet.config import AdamStep, LocalTrainerConfig, LossConfig
from whet.demos.arithmetic import solve
from whet.demos.problems import CALCULATOR, PATTERNS, SYSTEM, calculate, draw, problems
from whet.gateway.messages import Message, ToolCall
from whet.gateway.templates.chat_template import ChatTemplate
from whet.models.huggingface import LocalPolicy
from whet.trainers.local import LocalTrainer
from whet.training.rows import normalize
from whet.types import GenerationId, Row, SampledSegment

GOAL = 0.25
TEST_SEED = 1


def dialogue(template: ChatTemplate, index: int, rng: random.Random) -> Row:
    """A problem of the train split, solved with the calculator, as a row to imitate."""
    drawn = draw(PATTERNS[index % len(PATTERNS)], "train", rng)
    result = calculate(drawn.expression)
    call = ToolCall("call_0", "calculator", json.dumps({"expression": drawn.expression}))
    prompt = [Message("system", SYSTEM), Message("user", drawn.question)]
    calls = Message("assistant", tool_calls=(call,))
    result_message = Message("tool", result, tool_call_id="call_0")
    answers = Message("assistant", f"The answer is {result}.")

    def ids(messages: list[Message], *, open: bool) -> list[int]:
        return template.encode(template.render(messages, [CALCULATOR], add_generation_prompt=open))

    whole = ids([*prompt, calls, result_message, answers], open=False)
    newline = len(template.encode("\n"))  # stands after the end of a turn, and is not sampled
    edges = [
        (len(ids(prompt, open=True)), len(ids([*prompt, calls], open=False)) - newline),
        (len(ids([*prompt, calls, result_message], open=True)), len(whole) - newline),
    ]
    segments = tuple(
        SampledSegment(
            generation=GenerationId(f"{index}.{turn}"),
            start=start,
            logprobs=(0.0,) * (end - start),
            versions=(0,) * (end - start),
            advantages=(1.0,) * (end - start),
            weight=1.0,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
        )
        for turn, (start, end) in enumerate(edges)
    )
    return Row(tuple(whole[: edges[-1][1]]), segments, rollout=f"d{index}", group=f"d{index}")


def warm_up(folder: Path, into: Path, args: argparse.Namespace) -> dict[str, float]:
    """Imitate the dialogues; the model is written into a folder of its own."""
    template = ChatTemplate(folder)
    rng = random.Random("warm-up")
    rows = [dialogue(template, index, rng) for index in range(args.dialogues)]
    config = LocalTrainerConfig(weights="full")
    trainer = LocalTrainer(LocalPolicy(folder, config, device=args.device, seed=0))
    losses: list[float] = []

    async def work() -> None:
        for begin in range(0, args.epochs * len(rows), args.batch):
            if losses and fmean(losses[-4:]) < args.until:
                break
            some = [rows[index % len(rows)] for index in range(begin, begin + args.batch)]
            batch = normalize(some, LossConfig(), rollouts=len(some))
            metrics = await trainer.forward_backward(batch, LossConfig(name="cross_entropy"))
            await trainer.optim_step(AdamStep(lr=args.warm_up_rate))
            losses.append(metrics["loss"])
        await trainer.export(into)

    began = time.perf_counter()
    asyncio.run(work())
    return {
        "seconds": time.perf_counter() - began,
        "updates": len(losses),
        "dialogues": min(len(rows), args.batch * len(losses)),
        "first_loss": losses[0],
        "last_loss": fmean(losses[-4:]),
    }


def run(model: Path, args: argparse.Namespace, *, steps: int, name: str) -> whet.Result:
    return whet.train(
        solve,
        problems("train", 2000, args.seed),
        held_out=problems("test", args.held_out, TEST_SEED),
        model=str(model),
        dir=str(args.out / "work"),
        name=name,
        seed=args.seed,
        steps=steps,
        tasks_per_step=args.tasks,
        group_size=16,
        engine={"device": args.device, "kv_tokens": args.kv_tokens},
        trainer={"weights": "full"},
        adam={"lr": args.rate},
        runner={"concurrency": args.concurrency},
        loop={"name": args.loop},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dialogues", type=int, default=384)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--warm-up-rate", type=float, default=2e-5)
    parser.add_argument("--until", type=float, default=0.12)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--held-out", type=int, default=300)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--kv-tokens", type=int, default=524_288)
    parser.add_argument("--loop", choices=["on_policy", "overlapped"], default="on_policy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    began = time.perf_counter()
    gpu.head("SmolLM2-135M and the calculator")
    folder = gpu.model_folder(args.model)
    base = run(folder, args, steps=0, name="base")
    warm = args.out / "work" / "warm"
    print("warm-up", json.dumps(warm_up(folder, warm, args)), flush=True)
    result = run(warm, args, steps=args.steps, name="rl")
    seconds = time.perf_counter() - began
    assert base.comparison is not None
    assert result.comparison is not None
    print(f"{'':<16} greedy, 95 % interval     sampled, 95 % interval    ({args.held_out} tasks)")
    means: dict[str, float] = {}
    for name, of, side in (
        ("as it is", base.comparison, "base"),
        ("after warm-up", result.comparison, "base"),
        ("after RL", result.comparison, "trained"),
    ):
        cells: list[str] = []
        for measure, by_side in of.measures.items():
            found = by_side[side]
            assert found
            low, high = found.ci95 or (0.0, 1.0)
            cells.append(f"{found.mean:6.1%}  [{low:6.1%}, {high:6.1%}]")
            if measure == "greedy":
                means[name] = found.mean
        print(f"{name:<16} " + "   ".join(cells))
    gained = result.comparison.gains["greedy"]["trained"]
    assert gained
    low, high = gained.ci95 or (-1.0, 1.0)
    print(f"RL adds {gained.mean:+.1%} [{low:+.1%}, {high:+.1%}], paired; {seconds:.0f} s in all")
    report = {
        "rewards": result.rewards,
        "gap": [step.metrics.get("logprob_gap", 0.0) for step in result.steps],
        "collect": [step.metrics["collect_seconds"] for step in result.steps],
        "train": [step.metrics["train_seconds"] for step in result.steps],
        "base": base.as_json(),
        "rl": result.as_json(),
        "seconds": seconds,
    }
    (args.out / "learn.json").write_text(json.dumps(report))
    curve = result.run / "curve.png"
    if curve.exists():
        shutil.copy(curve, args.out / "learn.png")
    gain = means["after RL"] - means["after warm-up"]
    print("the goal is kept" if gain >= GOAL else "the goal is missed")
    return 0 if gain >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
