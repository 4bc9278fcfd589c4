"""Sizes of a cluster for 1k, 10k and 100k rollouts at once, from costs measured in this run.

    python bench/sizing.py [--operations 1000] [--stores http,postgres]
        [--rollouts-at-once 1000,10000,100000] [--seconds 120] [--calls 10] [--tokens 200]
        [--lease 30] [--agents 500] [--busy 0.7]

Measured: the CPU time of the store's processes for a claim, a heartbeat, the commit of a call and
an outcome, with 8 clients and 64 at once; the CPU time of a gateway for a call, with its commit to
a SQLite file; the memory it holds for a conversation; the connections of a process to PostgreSQL.

Computed: how many of each the rollouts need, if one lasts `--seconds` and has `--calls` calls of
`--tokens` sampled tokens each, every runner process has `--agents` at once, and no process or core
is busier than `--busy`. The computation is linear: it knows no waits for locks or disks, so its
numbers are lower bounds. `bench/scaling.py` measures whole stores.
"""

import argparse
import asyncio
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import NamedTuple

from load import cpu_s, put_load
from scaling import STORES, TOKEN

import gateway
from store import call, rollouts
from whet.protocols import Store
from whet.store import open_store
from whet.types import Attempt, Outcome

AT_ONCE = 64
CLIENTS = 8
DONE = Outcome(reward=1.0)
TURNS = gateway.TURNS


class StoreCosts(NamedTuple):
    """CPU milliseconds of the store's processes for an operation, and connections of a client."""

    claim: float
    heartbeat: float
    call: float
    outcome: float
    connections: int


class GatewayCosts(NamedTuple):
    """Cost of a model call in a gateway, and of a conversation in its memory."""

    call_ms: float
    conversation_kb: float


# ----------------------------------------------------------------- measured


async def measure_store(url: str, count: int) -> StoreCosts:
    """Operations of several clients, as of as many processes: each commits its own together."""
    async with AsyncExitStack() as stack:
        opened = [open_store(url, run="sizing", token=TOKEN) for _ in range(CLIENTS)]
        clients = [await stack.enter_async_context(store) for store in opened]
        await clients[0].enqueue(rollouts(0, count))
        claimed: dict[int, Attempt] = {}

        def client(number: int) -> Store:
            return clients[number % CLIENTS]

        async def claim(number: int) -> None:
            attempt = await client(number).claim(f"w{number}", lease_s=3600, wait_s=0)
            assert attempt is not None
            claimed[number] = attempt

        return StoreCosts(
            claim=await cost(claim, count),
            heartbeat=await cost(lambda n: client(n).heartbeat(claimed[n].id, lease_s=3600), count),
            call=await cost(lambda n: client(n).append(call(claimed[n], 0)), count),
            outcome=await cost(lambda n: client(n).finish(claimed[n].id, DONE), count),
            connections=count_connections(url) // CLIENTS if url.startswith("postgres") else 0,
        )


async def cost(operation: Callable[[int], Awaitable[object]], count: int) -> float:
    """CPU milliseconds of other processes for an operation, of many at once."""
    left = iter(range(count))

    async def work() -> None:
        for number in left:
            await operation(number)

    def others() -> float:
        return cpu_s(os.getpid()) - time.process_time()

    before = others()
    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return (others() - before) / count * 1e3


def count_connections(url: str) -> int:
    """Connections that this process has, besides the one that counts them."""
    import psycopg  # noqa: PLC0415 - only with PostgreSQL

    query = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
    with psycopg.connect(url) as connection:
        [found] = connection.execute(query).fetchone() or (1,)
    return int(found) - 1


async def measure_gateway(count: int, tokens: int) -> GatewayCosts:
    """So many conversations of several turns, all of which stay in the gateway's memory."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="whet-bench-")))
        size = ("--tokens", str(tokens), "--chunk", "1", "--delay-ms", "0")
        command = (sys.executable, gateway.__file__, "--serve-in", folder, *size)
        server = stack.enter_context(gateway.started(*command))

        async def run(first: int, number: int) -> float:
            places: list[tuple[str, str]] = json.loads(server.ask(str(number)))
            found = await put_load(
                server.address,
                server.process.pid,
                [
                    gateway.conversation(path, key, gateway.bodies("5.", n, stream=False))
                    for n, (path, key) in enumerate(places, first)
                ],
                concurrency=AT_ONCE,
                seconds=1e9,
            )
            return found.cpu_ms

        await run(0, AT_ONCE)  # warm
        before = resident_kb(server.process.pid)
        cpu_ms = await run(AT_ONCE, count)
        grown = resident_kb(server.process.pid) - before
    return GatewayCosts(cpu_ms, grown / count)


def resident_kb(process: int) -> float:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


# ----------------------------------------------------------------- computed


class Workload(NamedTuple):
    """The load of a rollout, and the allowed load of processes."""

    seconds: float
    calls: float
    tokens: float
    lease_s: float
    agents: int
    busy: float


class Size(NamedTuple):
    """The resources that a number of concurrent rollouts needs."""

    calls_per_s: float
    tokens_per_s: float
    store_cores: float
    """Kept busy by the store's processes."""
    gateways: int
    gateway_gb: float
    """Memory of conversations, in all gateways together."""
    runners: int
    connections: int
    """Of gateways, runners and the trainer to the store."""


def size_up(at_once: int, work: Workload, store: StoreCosts, gate: GatewayCosts) -> Size:
    """Compute what so many rollouts at once need."""
    ended = at_once / work.seconds
    calls = ended * work.calls
    heartbeats = at_once / (work.lease_s / 3)  # as runners renew them
    busy_ms = ended * (store.claim + store.outcome) + heartbeats * store.heartbeat
    busy_ms += calls * store.call
    gateways = max(1, math.ceil(calls * gate.call_ms / 1e3 / work.busy))
    runners = math.ceil(at_once / work.agents)
    return Size(
        calls_per_s=calls,
        tokens_per_s=calls * work.tokens,
        store_cores=busy_ms / 1e3,
        gateways=gateways,
        gateway_gb=at_once * gate.conversation_kb * work.calls / TURNS / 2**20,
        runners=runners,
        connections=(gateways + runners + 1) * store.connections,
    )


def show(
    counts: Sequence[int], work: Workload, costs: dict[str, StoreCosts], gate: GatewayCosts
) -> None:
    print("| store | claim | heartbeat | call | outcome | connections |\n|---|---|---|---|---|---|")
    for name, found in costs.items():
        times = " | ".join(f"{ms:.2f} ms" for ms in found[:4])
        print(f"| {name} | {times} | {found.connections or '-'} |")
    print(
        f"\ngateway: {gate.call_ms:.2f} ms a call; "
        f"{gate.conversation_kb:.0f} KB a conversation of {TURNS} turns\n"
    )
    print(
        "| at once | calls/s | sampled tokens/s | gateways | their memory | runners | store | "
        "its busy cores | connections |\n|---|---|---|---|---|---|---|---|---|"
    )
    for count in counts:
        for name, found in costs.items():
            size = size_up(count, work, found, gate)
            fits = name != "http" or size.store_cores <= work.busy
            print(
                f"| {count:,} | {size.calls_per_s:,.0f} | {size.tokens_per_s:,.0f} | "
                f"{size.gateways} | {size.gateway_gb:.1f} GB | {size.runners} | {name} | "
                f"{size.store_cores:.2f}{'' if fits else ': too many for one process'} | "
                f"{size.connections or '-'} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--operations", type=int, default=1000)
    parser.add_argument("--stores", default="http,postgres")
    parser.add_argument("--rollouts-at-once", default="1000,10000,100000")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--calls", type=float, default=10)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--lease", type=float, default=30)
    parser.add_argument("--agents", type=int, default=500)
    parser.add_argument("--busy", type=float, default=0.7)
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    costs: dict[str, StoreCosts] = {}
    for name in args.stores.split(","):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url = stack.enter_context(STORES[name](folder))
            costs[name] = asyncio.run(measure_store(url, args.operations))
    gate = asyncio.run(measure_gateway(args.operations, args.tokens))
    work = Workload(args.seconds, args.calls, args.tokens, args.lease, args.agents, args.busy)
    show([int(n) for n in args.rollouts_at_once.split(",")], work, costs, gate)


if __name__ == "__main__":
    main()
