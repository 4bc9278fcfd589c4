"""Benchmark of the store, with Agent Lightning's beside it where that is installed.

    python bench/store.py [--cycles 1000] [--workers 32] [--rounds 3] [--million] [--no-postgres]
    python bench/store.py --layer                   # only whet.agl's store and Agent Lightning's
    AGL_PYTHON=/path/to/python bench/store.py       # of an environment with agentlightning 0.3

Each store does the same work: enqueue in batches of 100; workers that claim a rollout, record 5
calls of 500 sampled tokens after 500 of context, and finish it (a cycle); read back a training
batch of 512 rollouts; list the first 100 succeeded rollouts of 1k, 10k and 100k. whet's records are
durable on disk when a call returns; Agent Lightning's are in memory. `whet.agl` is the store with
their methods, whose records are in memory, in a file, or behind HTTP. The stores take turns at the
cycles for several rounds, and medians are compared, since the speed of a machine changes from
minute to minute. `--million` also times claims in a file of a million rollouts.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import anyio

from whet.protocols import Store
from whet.store.http.client import HTTPStore
from whet.store.sqlite import SQLiteStore
from whet.types import (
    Attempt,
    Call,
    CallId,
    Generation,
    Origin,
    Outcome,
    Rollout,
    Sampling,
    Status,
)

CALLS, TOKENS = 5, 500
IDS = [tuple(random.randrange(1000, 150_000) for _ in range(TOKENS)) for _ in range(64)]
LOGPROBS = tuple(random.random() - 1 for _ in range(TOKENS))
SAMPLING = Sampling(max_tokens=TOKENS)
ORIGIN = Origin(model="policy", request="0" * 32)
MESSAGE = {"role": "assistant", "content": "y" * 400}
PROMPT = {"role": "user", "content": "x" * 400}

Numbers = dict[str, float]
IN_TURNS = ("cycles_per_s", "cpu_ms_per_cycle")
"""Numbers measured in every round; the others in the first only."""


def rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def call(attempt: Attempt, number: int) -> Call:
    """Make a call as the gateway does: without validation."""
    ids = random.choice(IDS)
    return Call.unchecked(
        id=CallId(f"{attempt.id}-{number}"),
        attempt=attempt.id,
        parent=None,
        root="root",
        messages=(PROMPT,),
        prompt_suffix=ids,
        prompt_length=TOKENS,
        prompt_digest="digest",
        generations=(
            Generation.unchecked(
                tokens=ids,
                logprobs=LOGPROBS,
                versions=(1,) * TOKENS,
                stop="stop",
                sampling=SAMPLING,
                message=MESSAGE,
            ),
        ),
        created=time.time(),
        origin=ORIGIN,
    )


def rollouts(start: int, count: int) -> list[Rollout]:
    return [
        Rollout(id=f"r{n}", task={"n": 1}, group=f"g{n // 8}") for n in range(start, start + count)
    ]


async def enqueue(store: Store, start: int, end: int, batch: int) -> float:
    began = time.perf_counter()
    for first in range(start, end, batch):
        await store.enqueue(rollouts(first, min(batch, end - first)))
    return (end - start) / (time.perf_counter() - began)


async def cycles(store: Store, workers: int) -> tuple[float, list[str]]:
    done: list[str] = []

    async def work() -> None:
        while attempt := await store.claim("w", lease_s=60, wait_s=0):
            for number in range(CALLS):
                await store.append(call(attempt, number))
            await store.finish(attempt.id, Outcome(reward=1.0))
            done.append(attempt.rollout.id)

    began = time.perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(workers):
            group.start_soon(work)
    return len(done) / (time.perf_counter() - began), done


async def latency_ms(times: int, act: Callable[[], Awaitable[object]]) -> float:
    took: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        await act()
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e3


async def wake_ms(store: Store) -> float:
    """Median milliseconds from an enqueue to the claim that waits for it."""
    took: list[float] = []
    for n in range(20):
        began, claimed = 0.0, list[float]()

        async def wait(claimed: list[float] = claimed) -> None:
            attempt = await store.claim("w", lease_s=60, wait_s=30)
            claimed.append(time.perf_counter())
            assert attempt is not None
            await store.finish(attempt.id, Outcome(reward=1.0))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.sleep(0.02)
            began = time.perf_counter()
            await store.enqueue([Rollout(id=f"wake{n}", task=1, group="wake")])
        took.append(claimed[0] - began)
    return statistics.median(took) * 1e3


async def measure(
    store: Store, count: int, workers: int, whole: bool, bytes_used: Callable[[], int]
) -> Numbers:
    result: Numbers = {"wake_ms": await wake_ms(store)} if whole else {}
    used, memory = bytes_used(), rss_mb()
    result["enqueue_per_s"] = await enqueue(store, 0, count, 100)
    cpu = time.process_time()
    result["cycles_per_s"], done = await cycles(store, workers)
    result["cpu_ms_per_cycle"] = (time.process_time() - cpu) / len(done) * 1e3
    if not whole:
        return result
    await store.vacuum()
    result["kb_per_rollout"] = (bytes_used() - used) / 1024 / len(done)
    result["rss_growth_mb"] = rss_mb() - memory
    batch = done[:512]
    began = time.perf_counter()
    assert len(await store.trajectories(batch)) == len(batch)
    result["batch_s"] = (time.perf_counter() - began) * 512 / len(batch)
    known = count
    for size in (1000, 10_000, 100_000):
        if size > known:
            await enqueue(store, known, size, 1000)
            known = size
        result[f"query_ms_at_{size}"] = await latency_ms(
            10, lambda: store.rollouts(status=Status.SUCCEEDED, limit=100)
        )
        result[f"claim_ms_at_{size}"] = await latency_ms(
            20, lambda: store.claim("w", lease_s=3600, wait_s=0)
        )
    result["rss_mb"] = rss_mb()
    return result


async def on_sqlite(count: int, workers: int, whole: bool) -> Numbers:
    with tempfile.TemporaryDirectory() as name:
        async with SQLiteStore(Path(name) / "store.db") as store:
            return await measure(store, count, workers, whole, lambda: size_of(Path(name)))


async def on_postgres(count: int, workers: int, whole: bool) -> Numbers:
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    from support.servers.postgres_server import postgres_server  # noqa: PLC0415 - in the tests
    from whet.store.postgres import PostgresStore  # noqa: PLC0415 - needs the extra

    with ExitStack() as stack:
        url = stack.enter_context(postgres_server("fsync=on"))
        data = Path(url.split("host=")[1]) / "base"
        async with PostgresStore(url) as store:
            return await measure(store, count, workers, whole, lambda: size_of(data))


SERVE = """
import sys
from pathlib import Path
from whet.app.cli.main import tune_gc
from whet.store.http.server import StoreServer
from whet.store.sqlite import SQLiteStore
tune_gc()  # as `whet store` does
server = StoreServer(SQLiteStore(Path(sys.argv[1])), token="bench")
print(server.url, flush=True)
sys.stdin.read()
server.close()
"""


def over_http(count: int, workers: int, whole: bool) -> Numbers:
    """Measure a server in another process; the workers share one client."""
    pipe = subprocess.PIPE
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-c", SERVE, str(Path(name) / "store.db")]
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
            assert server.stdout is not None
            assert server.stdin is not None
            url = server.stdout.readline().strip()
            numbers = anyio.run(at, url, count, workers, whole, lambda: size_of(Path(name)))
            server.stdin.close()
            return numbers


async def at(
    url: str, count: int, workers: int, whole: bool, bytes_used: Callable[[], int]
) -> Numbers:
    async with HTTPStore.connect(url, token="bench") as store:
        return await measure(store, count, workers, whole, bytes_used)


async def on_a_million() -> Numbers:
    with tempfile.TemporaryDirectory() as name:
        async with SQLiteStore(Path(name) / "store.db") as store:
            result = {"enqueue_per_s": await enqueue(store, 0, 1_000_000, 5000)}
            result["claim_ms"] = await latency_ms(
                200, lambda: store.claim("w", lease_s=3600, wait_s=0)
            )
            return result


def agent_lightning(
    library: str, how: str, python: str, count: int, workers: int, whole: bool
) -> Numbers:
    work = (how, str(count), str(workers), "whole" if whole else "cycles", library)
    command = [python, str(Path(__file__).parent / "agl" / "store.py"), *work]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.strip().splitlines()[-1])


def in_turns(
    sides: dict[str, Callable[[bool], Numbers]], rounds: int, *, whole: bool
) -> dict[str, Numbers]:
    """Run all sides in turns: each number once, and the median of those measured in every round."""
    found: dict[str, list[Numbers]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            found[name].append(side(whole and number == 0))
    return {
        name: numbers[0] | {key: statistics.median(n[key] for n in numbers) for key in IN_TURNS}
        for name, numbers in found.items()
    }


def show(results: dict[str, Numbers]) -> None:
    names = list(dict.fromkeys(name for numbers in results.values() for name in numbers))
    print(f"{'':20}" + "".join(f"{column:>16}" for column in results))
    for name in names:
        cells = (numbers.get(name) for numbers in results.values())
        print(
            f"{name:20}" + "".join("               -" if c is None else f"{c:16.2f}" for c in cells)
        )
    layers = ("whet.agl memory", "whet.agl sqlite", "whet.agl http")
    for ours in ("sqlite", "postgres", "http", *layers):
        for other in ("agl memory", "agl http"):
            if ours in results and other in results:
                cycles = results[ours]["cycles_per_s"] / results[other]["cycles_per_s"]
                cpu = cpu_ms(results[other]) / cpu_ms(results[ours])
                print(f"{ours} / {other}: {cycles:.1f} times the cycles, {cpu:.1f} times less CPU")


def cpu_ms(numbers: Numbers) -> float:
    """CPU of a cycle, that of a server in another process included where it was measured."""
    return numbers["cpu_ms_per_cycle"] + numbers.get("server_cpu_ms_per_cycle", 0.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--million", action="store_true")
    parser.add_argument("--layer", action="store_true")
    parser.add_argument("--postgres", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    work = (args.cycles, args.workers)
    sides: dict[str, Callable[[bool], Numbers]] = {
        "sqlite": partial(anyio.run, on_sqlite, *work),
        "http": partial(over_http, *work),
    }
    if args.layer:
        sides.clear()
    elif args.postgres:
        sides["postgres"] = partial(anyio.run, on_postgres, *work)
    for how in ("memory", "sqlite", "http"):
        layer = partial(agent_lightning, "whet.agl", how, sys.executable)
        sides[f"whet.agl {how}"] = partial(layer, *work)
    if python := os.environ.get("AGL_PYTHON"):
        theirs = partial(agent_lightning, "agentlightning")
        few = min(args.cycles, 200)
        sides["agl memory"] = partial(theirs, "memory", python, few, args.workers)
        sides["agl http"] = partial(theirs, "http", python, few, args.workers)
    results = in_turns(sides, args.rounds, whole=not args.layer)
    if args.million:
        results["sqlite, 1M"] = anyio.run(on_a_million)
    show(results)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
