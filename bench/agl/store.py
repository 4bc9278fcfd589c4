"""Stores with Agent Lightning's methods at the work of `bench/store.py`: its own, or whet.agl's.

    python bench/agl/store.py memory|http CYCLES WORKERS whole|cycles [agentlightning]
    python bench/agl/store.py memory|sqlite|http CYCLES WORKERS whole|cycles whet.agl

Agent Lightning has an environment of its own, and nothing of whet is imported there. Prints one
JSON object.
"""

import asyncio
import importlib
import json
import logging
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

LIBRARY = sys.argv[5] if len(sys.argv) > 5 else "agentlightning"
try:
    agl: Any = importlib.import_module(LIBRARY)
except ImportError:
    sys.exit(0)  # not by itself: bench/store.py runs it where Agent Lightning is installed

CALLS, TOKENS = 5, 500
IDS = [[random.randrange(1000, 150_000) for _ in range(TOKENS)] for _ in range(64)]


def rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def span(rollout: str, attempt: str, number: int) -> Any:
    """A call as their tracer makes it: the ids are attributes, beside what was said."""
    ids = random.choice(IDS)
    return agl.Span.from_attributes(
        rollout_id=rollout,
        attempt_id=attempt,
        sequence_id=number,
        name="openai.chat.completion",
        attributes={
            "prompt_token_ids": list(ids),
            "response_token_ids": list(ids),
            "gen_ai.request.model": "policy",
            "gen_ai.prompt.0.content": "x" * 400,
            "gen_ai.completion.0.content": "y" * 400,
        },
        start_time=time.time(),
        end_time=time.time(),
    )


async def enqueue(store: Any, count: int, batch: int) -> None:
    for first in range(0, count, batch):
        requests = [
            agl.EnqueueRolloutRequest(input={"n": 1}, mode="train")
            for _ in range(min(batch, count - first))
        ]
        await store.enqueue_many_rollouts(requests)


async def measure(
    stores: list[Any], cycles: int, workers: int, *, whole: bool, many: bool
) -> dict[str, float]:
    store, result, before = stores[0], {}, rss_mb()
    began = time.perf_counter()
    await enqueue(store, cycles, batch=100)
    result["enqueue_per_s"] = cycles / (time.perf_counter() - began)
    done: list[str] = []

    async def work(mine: Any) -> None:
        while rollout := await mine.dequeue_rollout(worker_id="w"):
            attempt = rollout.attempt.attempt_id
            for number in range(CALLS):
                await mine.add_span(span(rollout.rollout_id, attempt, number + 1))
            await mine.update_attempt(rollout.rollout_id, attempt, status="succeeded")
            done.append(rollout.rollout_id)

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work(stores[n % len(stores)]) for n in range(workers)))
    result["cycles_per_s"] = len(done) / (time.perf_counter() - began)
    result["cpu_ms_per_cycle"] = (time.process_time() - cpu) / len(done) * 1e3
    if not whole:
        return result
    batch = done[:512]
    began = time.perf_counter()
    for rollout in batch:
        assert len(await store.query_spans(rollout, "latest")) == CALLS
    result["batch_s"] = (time.perf_counter() - began) * 512 / len(batch)
    result["kb_per_rollout"] = (rss_mb() - before) * 1024 / len(done)
    if many:
        result |= await listing(store, cycles)
    result["rss_mb"] = rss_mb()
    return result


async def listing(store: Any, known: int) -> dict[str, float]:
    result = {}
    for size in (1000, 10_000, 100_000):
        await enqueue(store, size - known, batch=500)
        known = max(known, size)
        took = []
        for _ in range(10):
            began = time.perf_counter()
            await store.query_rollouts(status_in=["succeeded"], limit=100)
            took.append(time.perf_counter() - began)
        result[f"query_ms_at_{size}"] = percentile(took, 0.5) * 1e3
    return result


def start(port: int) -> "subprocess.Popen[bytes]":
    where = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "WARNING"]
    command = [Path(sys.executable).with_name("agl"), "store", *where]
    if LIBRARY != "agentlightning":
        command = [sys.executable, "-m", LIBRARY, "store", *where]
        os.environ["WHET_STORE_TOKEN"] = "bench"
    return subprocess.Popen(command, stdout=sys.stderr)


def wait_until_up(url: str) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(url, timeout=5)
        except OSError:
            time.sleep(0.2)
        else:
            return


async def over_http(cycles: int, workers: int, whole: bool) -> dict[str, float]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    server = start(port)
    try:
        await asyncio.to_thread(wait_until_up, f"http://127.0.0.1:{port}/v1/agl/health")
        clients = [agl.LightningStoreClient(f"http://127.0.0.1:{port}") for _ in range(workers)]
        before = cpu_s(server.pid)
        result = await measure(clients, cycles, workers, whole=whole, many=False)
        result["server_cpu_ms_per_cycle"] = (cpu_s(server.pid) - before) / cycles * 1e3
        for client in clients:
            await client.close()
        return result
    finally:
        server.terminate()
        server.wait()


async def in_memory(cycles: int, workers: int, whole: bool) -> dict[str, float]:
    store = agl.InMemoryLightningStore()
    return await measure([store], cycles, workers, whole=whole, many=True)


async def in_sqlite(cycles: int, workers: int, whole: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        store = agl.SqliteLightningStore(Path(name) / "store.db")
        result = await measure([store], cycles, workers, whole=whole, many=True)
        await store.close()
        return result


def main() -> None:
    if len(sys.argv) not in (5, 6):
        print("run by bench/store.py, with AGL_PYTHON")
        return
    logging.disable(logging.WARNING)
    how = {"memory": in_memory, "sqlite": in_sqlite, "http": over_http}[sys.argv[1]]
    result = asyncio.run(how(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "whole"))
    print(json.dumps({**result, "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
