"""Rate of the runner on an agent without model calls, beside Agent Lightning's if installed.

    python bench/runners.py [--rollouts 3000] [--at-once 300]
    AGL_PYTHON=/path/to/python bench/runners.py     # of an environment with agentlightning 0.3

Ours: one runner, `--at-once` attempts at a time, at a SQLite store on disk, each outcome durable
before it counts. Theirs: one runner, as `Trainer.fit` starts it, with processes around an HTTP
server (its default) and with threads around a store in memory. Rollouts per second from the first
that is picked up to the last that ended; both in this run, one after the other.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import anyio

from whet.config import RunnerConfig
from whet.runners.endpoints import NoEndpoint
from whet.runners.runner import Runner
from whet.store.sqlite import SQLiteStore
from whet.types import Endpoint, Rollout

THEIRS = {"cs": "processes over HTTP", "shm": "threads in memory"}


async def agent(task: object, llm: Endpoint) -> float:
    return 1.0


def work(task: object, llm: Endpoint) -> float:
    return 1.0


async def ours(rollouts: int, at_once: int, *, is_async: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        async with SQLiteStore(Path(folder) / "store.db") as store:
            runner = Runner(
                agent if is_async else work,
                RunnerConfig(concurrency=at_once),
                store=store,
                endpoints=NoEndpoint(),
            )
            wanted = [Rollout(id=f"r{n}", group="g", task={"n": n}) for n in range(rollouts)]
            await store.enqueue(wanted)
            began, cpu = time.perf_counter(), time.process_time()
            took = 0.0
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(runner.run)
                await store.wait([rollout.id for rollout in wanted])
                took = time.perf_counter() - began
                tasks.cancel_scope.cancel()
            failed = len(await store.failures([rollout.id for rollout in wanted]))
    return {
        "rollouts_per_s": rollouts / took,
        "failed": failed,
        "cpu_ms": (time.process_time() - cpu) / rollouts * 1e3,
    }


def theirs(python: str, how: str, rollouts: int) -> dict[str, float]:
    program = Path(__file__).parent / "agl" / "runner.py"
    done = subprocess.run(
        [python, program, how, str(rollouts)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=400,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def show(name: str, found: dict[str, float]) -> None:
    cpu = f"  {found['cpu_ms']:.2f} ms of CPU each" if "cpu_ms" in found else ""
    print(
        f"{name:<34} {found['rollouts_per_s']:>8.1f} rollouts/s  {found['failed']:.0f} failed{cpu}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=3000)
    parser.add_argument("--at-once", type=int, default=300)
    args = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    mine = anyio.run(lambda: ours(args.rollouts, args.at_once, is_async=True))
    show(f"whet, async, {args.at_once} at once", mine)
    show(
        f"whet, plain, {args.at_once} at once",
        anyio.run(lambda: ours(args.rollouts, args.at_once, is_async=False)),
    )
    if python := os.environ.get("AGL_PYTHON"):
        for how, label in THEIRS.items():
            found = theirs(python, how, 200)
            show(f"Agent Lightning, {label}", found)
            faster = mine["rollouts_per_s"] / found["rollouts_per_s"]
            less = (
                f", {found['cpu_ms'] / mine['cpu_ms']:.1f} times in CPU"
                if "cpu_ms" in found
                else ""
            )
            print(f"{'':<34} {faster:>8.1f} times{less}")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
