"""The whole path of a run, from agents to published weights, and where its time goes.

    python bench/path.py [--agent shared_client own_client] [--processes 0 4] [--rollouts 128]
    python bench/path.py --device cuda --model 135m --rollouts 512 --steps 10

Agents make two calls of 64 tokens each with the OpenAI client, built as users build it. On a CPU
the engine is simulated: it takes as long as an H200 takes for SmolLM2-135M at that batch, and
samples random tokens; gateway, store, runner, trainer and the tiny model are real. On a GPU all is.
The first two steps are not counted: kernels are compiled in the first update. The phases of a step
add up to its wall time. The table of parts has the CPU seconds of a step, by thread and process;
with what was left idle they add up to the cores times the wall time. The share of the engine is of
what it samples by itself, without clients, gateway and store.
"""

import argparse
import asyncio
import gc
import os
import random
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import path_agents

import whet
from whet.algorithms import build_algorithm
from whet.app.composition import run as composition
from whet.app.composition.samplers import LocalWeights, Sampler, build_renderer
from whet.config import resolve
from whet.demos.problems import problems
from whet.models.huggingface import LocalPolicy
from whet.protocols import Engine
from whet.types import Sampling, TokenChunk

GROUP = 16
WARM_UP = 2
"""Steps that are not counted."""
TICKS = os.sysconf("SC_CLK_TCK")

STEP_S = 0.00215
PEAK_TOKENS = 226_000
"""A step of so many seconds plus one for each so many rows: 78,000 tokens/s at a batch of 256 and
152,000 at 1024, as measured on an H200."""

SECOND_TURN = tuple(range(300, 312))
"""As many tokens as the user's second message has in the chat template."""

PARTS = {
    "whet-agent": "agents' clients",
    "whet-gateway": "gateway",
    "whet-store": "store",
    "whet-engine": "engine",
    "MainThread": "run and runner",
}
"""By the beginning of a thread's name; the trainer's work is in threads of anyio and torch."""


class SimulatedEngine(Engine):
    """Takes as long as a GPU would, and samples random tokens of the vocabulary's middle."""

    def __init__(self, policy: LocalPolicy) -> None:
        self._policy = policy
        self._rows = 0
        self._random = random.Random(0)

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, stream: bool = False, affinity: str = ""
    ) -> AsyncGenerator[TokenChunk]:
        count = sampling.max_tokens or 64
        self._rows += 1
        try:
            await asyncio.sleep(count * (STEP_S + self._rows / PEAK_TOKENS))
        finally:
            self._rows -= 1
        tokens = tuple(self._random.randrange(300, 900) for _ in range(count))
        versions = (self._policy.version,) * count
        yield TokenChunk(tokens, (-6.4,) * count, versions, stop="length")

    async def close(self) -> None:
        pass


@asynccontextmanager
async def simulated_sampler(policy, config) -> AsyncGenerator[Sampler]:
    renderer = build_renderer(policy.folder, config)
    yield Sampler(SimulatedEngine(policy), 8192, renderer, LocalWeights(policy))


@dataclass(frozen=True)
class Snapshot:
    """CPU seconds by part so far, at a time."""

    at: float
    cpu: dict[str, float]


class Measured:
    """The algorithm of a config, which takes a snapshot whenever a step has been collected."""

    def __init__(self, settings: dict) -> None:
        self._algorithm = build_algorithm(resolve(settings))
        self.snapshots: list[Snapshot] = []

    async def credit(self, groups, past):
        self.snapshots.append(Snapshot(time.perf_counter(), read_cpu()))
        return await self._algorithm.credit(groups, past)


def read_cpu() -> dict[str, float]:
    """CPU seconds of each thread of this process, and of its children, by part."""
    cpu = defaultdict[str, float](float)
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        name = names.get(int(task.name), "")
        part = next((part for start, part in PARTS.items() if name.startswith(start)), "trainer")
        cpu[part] += read_ticks(task / "stat")
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            part = "gateway processes" if b"gateway_worker" in command else "agents' clients"
            cpu[part] += read_ticks(Path(f"/proc/{pid}/stat"))
    return cpu


def read_ticks(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def measure(agent, processes: int, gateways: int, args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        settings: dict[str, Any] = {
            "model": str(args.model),
            "dir": directory,
            "steps": args.steps + WARM_UP,
            "tasks_per_step": args.rollouts // GROUP,
            "group_size": GROUP,
            "engine": {"device": args.device, "kv_tokens": count_kv_tokens(args.rollouts)},
            "trainer": {"weights": args.weights},
            "adam": {"lr": 1e-6},
            "loop": {"name": args.loop},
            "runner": {"concurrency": args.rollouts, "processes": processes},
            "gateway": {"processes": gateways},
        }
        algorithm = Measured({**settings, "model": "tiny"})
        tasks = problems("train", 500, 0)
        result = whet.train(agent, tasks, algorithm=algorithm, quiet=True, **settings)
    report(agent, processes, gateways, result, algorithm.snapshots, args)


def report(agent, processes: int, gateways: int, result, snapshots: list[Snapshot], args) -> None:
    first, last = snapshots[WARM_UP - 1], snapshots[-1]
    steps = len(snapshots) - WARM_UP
    wall = (last.at - first.at) / steps
    collect = [step.metrics["collect_seconds"] for step in result.steps[WARM_UP:]]
    train = fmean(step.metrics["train_seconds"] for step in result.steps[WARM_UP:])
    calls, tokens = 2 * args.rollouts, 2 * args.rollouts * path_agents.TOKENS
    print(
        f"{agent.__name__:<14} {processes:>9} {gateways:>8} {wall:>7.2f} {fmean(collect):>8.2f}"
        f" {collect[0]:>6.2f} {collect[-1]:>6.2f} {train:>7.2f} {args.rollouts / wall:>10.0f}"
        f" {calls / fmean(collect):>8.0f} {tokens / fmean(collect):>9,.0f}"
        f" {tokens / fmean(collect) / args.engine_rate:>7.0%}",
        flush=True,
    )
    print(f"  {wall:.2f} s: " + ", ".join(describe_phases(result, wall)), flush=True)
    cores = len(os.sched_getaffinity(0))
    used = {part: cpu - first.cpu.get(part, 0.0) for part, cpu in last.cpu.items()}
    whole = cores * (last.at - first.at)
    used["idle"] = whole - sum(used.values())
    ordered = sorted(used.items(), key=lambda item: -item[1])
    shares = (f"{part} {s / steps:.2f} s ({s / whole:.0%})" for part, s in ordered)
    print(f"  {cores} cores x {wall:.2f} s: " + ", ".join(shares), flush=True)


def measure_engine(folder: Path, rollouts: int, device: str) -> float:
    """Tokens a second that the engine samples by itself: both calls of every rollout at once."""
    from gpu import common as gpu  # noqa: PLC0415 - only if needed

    async def sample() -> float:
        local = gpu.load(folder, device, count_kv_tokens(rollouts))
        prompts = [p for p in gpu.prompts(folder, rollouts // GROUP) for _ in range(GROUP)]
        seconds = 0.0
        for _ in range(3):  # the last is warm
            local.policy.revision += 1  # as after a step: no prefix is left from before
            began = time.perf_counter()
            first = await local.sample(prompts, max_tokens=path_agents.TOKENS)
            again = [[*row.tokens, *SECOND_TURN] for row in first]
            await local.sample(again, max_tokens=path_agents.TOKENS)
            seconds = time.perf_counter() - began
        await local.engine.close()
        return seconds

    return 2 * rollouts * path_agents.TOKENS / asyncio.run(sample())


def count_kv_tokens(rollouts: int) -> int:
    """Positions of the KV cache for all rollouts at once, with two replies and short messages."""
    return rollouts * max(512, 1 << (2 * path_agents.TOKENS + 128).bit_length())


def describe_phases(result, wall: float) -> list[str]:
    """Mean seconds of each phase of a step; with the rows, and what is between steps, its wall."""

    def mean(name: str) -> float:
        return fmean(step.metrics[f"{name}_seconds"] for step in result.steps[WARM_UP:])

    phases = {name: mean(name) for name in ("collect", "credit", "train", "publish", "save")}
    phases["rows and metrics"] = mean("step") - sum(phases.values())
    phases["commit and next step"] = wall - mean("step")
    return [f"{name} {seconds:.2f}" for name, seconds in phases.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = ["shared_client", "own_client"]
    parser.add_argument("--agent", nargs="+", choices=names, default=names)
    parser.add_argument("--processes", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--gateways", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rollouts", type=int, default=128, help="rollouts per step")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--weights", choices=["full", "lora"], default="full")
    parser.add_argument("--loop", choices=["on_policy", "overlapped"], default="on_policy")
    parser.add_argument("--dir", help="folder for the runs, such as /dev/shm")
    args = parser.parse_args()
    if args.device == "cpu":
        composition.open_local_sampler = simulated_sampler
        args.engine_rate = 1 / (STEP_S / args.rollouts + 1 / PEAK_TOKENS)
    else:
        from gpu import common as gpu  # noqa: PLC0415 - only if needed

        gpu.head("the whole path")
        args.model = gpu.model_folder(args.model)
        args.engine_rate = measure_engine(args.model, args.rollouts, args.device)
        gc.collect()
        gpu.forget_peak()
        print(f"the engine by itself: {args.engine_rate:,.0f} tokens/s")
    print(
        f"{'agent':<14} {'processes':>9} {'gateways':>8} {'step s':>7} {'collect':>8}"
        f" {'first':>6} {'last':>6} {'train':>7} {'rollouts/s':>10} {'calls/s':>8}"
        f" {'tokens/s':>9} {'engine':>7}"
    )
    for name in args.agent:
        for processes in args.processes:
            for gateways in args.gateways:
                measure(getattr(path_agents, name), processes, gateways, args)


if __name__ == "__main__":
    main()
