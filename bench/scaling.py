"""Rate of N runner processes on one store, over HTTP and on PostgreSQL, and where it bends.

    python bench/scaling.py [--rollouts 2000] [--runners 1,2,4,8] [--stores http,postgres]
        [--think 0] [--at-once 64]

Each runner is a `whet runner` process with an agent without model calls that waits `--think`
seconds. Every claim and outcome is durable before it counts. Rollouts per second from the first
attempt that began to the last that ended, all runners having joined before the queue is filled;
`of one` is the rate against one runner. The cores are those that runners and store kept busy, from
/proc, so Linux's alone. It bends where more runners give less than half of what they should. With a
wait the question is how many rollouts a store holds at once: `--think 10 --at-once 1000`.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from load import cpu_s

from whet.io.process import find_free_port
from whet.protocols import Store
from whet.store import open_store
from whet.types import AttemptRecord, Rollout

AGENT = "import asyncio\nasync def work(task):\n    await asyncio.sleep(task)\n    return 1.0\n"
TOKEN = "token-of-the-benchmark"


@contextmanager
def http_store(folder: Path) -> Generator[str]:
    """`whet store` on a SQLite file, in a process of its own."""
    url = f"http://127.0.0.1:{(port := find_free_port())}"
    with command(folder, "store", f"--port={port}", "--dir=."):
        yield url


@contextmanager
def postgres_store(folder: Path) -> Generator[str]:
    """PostgreSQL, which runners talk to themselves; as durable as by default."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from support.servers.postgres_server import postgres_server  # noqa: PLC0415 - in the tests

    with postgres_server("fsync=on", "max_connections=400") as url:
        yield url


STORES = {"http": http_store, "postgres": postgres_store}


@contextmanager
def command(folder: Path, *arguments: str) -> Generator[int]:
    """A `whet` command; yields its process id."""
    process = subprocess.Popen(
        [sys.executable, "-m", "whet", *arguments],
        cwd=folder,
        env={**os.environ, "WHET_STORE_TOKEN": TOKEN},
        stdout=subprocess.DEVNULL,
    )
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(60)


class Case(NamedTuple):
    """Result of one store with so many runners."""

    rate: float
    """Rollouts per second."""
    runner_cores: float
    store_cores: float


def busy_seconds(runners: Sequence[int]) -> tuple[float, float]:
    """CPU seconds of runners, and of the store's processes: this one has started no others."""
    of_runners = sum(map(cpu_s, runners))
    return of_runners, cpu_s(os.getpid()) - time.process_time() - of_runners


async def measure(url: str, run: str, pids: Sequence[int], rollouts: int, think: float) -> Case:
    """Fill the queue once all runners wait at it."""
    async with open_store(url, run=run, token=TOKEN) as store:
        while len(await store.workers()) < len(pids):  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.1)
        ids = [f"r{n}" for n in range(rollouts)]
        before, began = busy_seconds(pids), time.monotonic()
        await store.enqueue([Rollout(id=id, group="g", task=think) for id in ids])
        await store.wait(ids)
        took, after = time.monotonic() - began, busy_seconds(pids)
        attempts = await last_attempts(store, ids)
        seconds = max(a.ended or 0 for a in attempts) - min(a.started for a in attempts)
        cores = [(b - a) / took for a, b in zip(before, after, strict=True)]
        return Case(rollouts / seconds, *cores)


async def last_attempts(store: Store, ids: list[str]) -> list[AttemptRecord]:
    limit = asyncio.Semaphore(32)

    async def last(id: str) -> AttemptRecord:
        async with limit:
            return (await store.attempts(id))[-1]

    return await asyncio.gather(*map(last, ids))


def run_case(store: str, runners: int, args: argparse.Namespace) -> Case:
    """Start a store and so many runners, and measure them."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "agent.py").write_text(AGENT)
        url = stack.enter_context(STORES[store](folder))
        run = f"n{runners}"
        flags = (f"--concurrency={args.at_once}", "--processes=0", "--gateway=none")
        place = ("--store", url, "--run", run, "--dir=.")
        pids = [
            stack.enter_context(command(folder, "runner", "agent.py:work", *place, *flags))
            for _ in range(runners)
        ]
        return asyncio.run(measure(url, run, pids, args.rollouts, args.think))


def find_bend(rates: dict[int, float]) -> int | None:
    """The number of runners after which more of them give less than half of what they should."""
    counts = sorted(rates)
    for few, more in pairwise(counts):
        if rates[more] / rates[few] - 1 < (more / few - 1) / 2:
            return few
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--runners", default="1,2,4,8")
    parser.add_argument("--stores", default="http,postgres")
    parser.add_argument("--think", type=float, default=0.0)
    parser.add_argument("--at-once", type=int, default=64)
    args = parser.parse_args()
    counts = [int(n) for n in args.runners.split(",")]
    print(f"{args.rollouts} rollouts, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(
        f"{'store':<10} {'runners':>7} {'rollouts/s':>11} {'of one':>7} "
        f"{'runner cores':>13} {'store cores':>12}"
    )
    for store in args.stores.split(","):
        rates: dict[int, float] = {}
        for runners in counts:
            case = run_case(store, runners, args)
            rates[runners] = case.rate
            print(
                f"{store:<10} {runners:>7} {case.rate:>11.0f} {case.rate / rates[counts[0]]:>7.2f} "
                f"{case.runner_cores:>13.1f} {case.store_cores:>12.1f}"
            )
        bend = find_bend(rates)
        print(f"{store}: " + (f"bends at {bend} runners" if bend else "does not bend"))


if __name__ == "__main__":
    main()
