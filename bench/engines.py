"""The cost of the gateway in front of vLLM: tokens per second, and time to the first token.

    python bench/engines.py --url http://127.0.0.1:8000 [--pid PID] [--concurrency 1 16 64]

The same streamed chat requests, for ids and log-probabilities as any recorder for training asks
them, go to a vLLM that runs already (1) directly and (2) through the gateway, which renders,
samples by token ids, and commits every call to a SQLite file before its last event leaves. Both are
measured in the same run, in turns, so that what the machine does besides falls on each alike. The
gateway is a process of its own.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from load import cpu_s

from whet.app.composition.gateway_server import Gateway
from whet.config import GatewayConfig
from whet.demos.problems import problems
from whet.engines.remote.connect import connect_servers
from whet.gateway.app import build_app
from whet.gateway.pipeline import CallPipeline
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.renderer import Renderer
from whet.io.server import AppServer
from whet.models.catalog import read_model_context, resolve_model
from whet.store.sqlite import SQLiteStore
from whet.types import Rollout

SECRET = b"bench"
ATTEMPTS = 64


@dataclass(frozen=True)
class Measured:
    """One round of requests."""

    tokens: int
    seconds: float
    first: float
    """Median time to the first token."""
    gateway_cpu: float
    """Seconds that the gateway computed meanwhile."""
    vllm_cpu: float
    """Seconds that the vLLM did, where its process is known."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


async def serve_gateway(url: str, model: str) -> None:
    """Print the addresses of attempts; serve until stdin closes."""
    folder = resolve_model(model)
    template = ChatTemplate(folder)
    engine = await connect_servers(
        "vllm",
        [url],
        template.decode,
        context_length=read_model_context(folder),
        progress=lambda text: None,
    )
    with tempfile.TemporaryDirectory() as place:
        async with SQLiteStore(Path(place) / "store.db") as store:
            pipeline = CallPipeline(
                engine=engine, log=store, renderer=Renderer(template), models=("policy",)
            )
            server = AppServer(build_app(pipeline, SECRET, GatewayConfig()))
            await store.enqueue([Rollout(id=f"r{n}", task={}, group="g") for n in range(ATTEMPTS)])
            endpoint = Gateway(server.url, SECRET, "policy").endpoint
            endpoints = []
            while attempt := await store.claim("bench", lease_s=3600, wait_s=0):
                endpoints.append(endpoint(attempt).model_dump())
            print(json.dumps(endpoints), flush=True)
            await asyncio.to_thread(sys.stdin.read)
            await engine.close()
            server.close()


async def one(
    session: aiohttp.ClientSession, url: str, key: str, body: dict[str, Any]
) -> tuple[int, float]:
    """Tokens of a request, and seconds to the first."""
    began, first, tokens, rest = time.perf_counter(), 0.0, 0, b""
    headers = {"Authorization": f"Bearer {key}"}
    async with session.post(f"{url}/chat/completions", json=body, headers=headers) as reply:
        if reply.status != 200:
            raise SystemExit(f"{url} answers {reply.status}: {await reply.text()}")
        async for chunk in reply.content.iter_any():
            *events, rest = (rest + chunk).split(b"\n\n")
            for event in events:
                data = event.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    continue
                for choice in json.loads(data).get("choices", []):
                    new = len(choice.get("token_ids") or ())
                    if new and not tokens:
                        first = time.perf_counter() - began
                    tokens += new
    return tokens, first


async def measure(
    places: list[tuple[str, str]],
    model: str,
    concurrency: int,
    count: int,
    most: int,
    seed: int,
    pids: tuple[int, int | None],
) -> Measured:
    """`count` requests to these places, so many at once; `pids` are the gateway's and vLLM's."""
    tasks = iter(problems("train", count, seed))
    results: list[tuple[int, float]] = []

    async def work(worker: int) -> None:
        for task in tasks:
            url, key = places[worker % len(places)]
            body = {
                "model": model,
                "messages": [{"role": "user", "content": task["question"]}],
                "max_tokens": most,
                "temperature": 1.0,  # a model's own defaults may be others
                "top_p": 1.0,
                "stream": True,
                "logprobs": True,
                "return_token_ids": True,
            }
            results.append(await one(session, url, key, body))

    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        began, before = time.perf_counter(), [cpu_s(pid) for pid in pids]
        await asyncio.gather(*(work(n) for n in range(concurrency)))
        seconds = time.perf_counter() - began
    return Measured(
        sum(tokens for tokens, _ in results),
        seconds,
        median(first for _, first in results),
        *(cpu_s(pid) - spent for pid, spent in zip(pids, before, strict=True)),
    )


def start_gateway(url: str, model: str) -> tuple[subprocess.Popen[str], list[dict[str, str]]]:
    command = [sys.executable, __file__, "--serve", "--url", url, "--model", model]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, json.loads(server.stdout.readline())


async def run(args: argparse.Namespace) -> None:
    server, endpoints = await asyncio.to_thread(start_gateway, args.url, args.model)
    through = [(endpoint["base_url"], endpoint["api_key"]) for endpoint in endpoints]
    async with aiohttp.ClientSession() as session, session.get(f"{args.url}/v1/models") as reply:
        model = (await reply.json())["data"][0]["id"]
    sides = {"straight": ([(f"{args.url}/v1", "none")], model), "gateway": (through, "policy")}
    print(f"{args.model}, {args.most} new tokens at most; medians of {args.rounds} rounds in turns")
    print("| at once | straight tok/s | gateway | ratio | straight first | gateway |", end="")
    print(" CPU µs a token: vLLM, straight | vLLM, through | gateway |")
    print("|---|---|---|---|---|---|---|---|---|")
    try:
        for concurrency in args.concurrency:
            count = max(args.least, args.each * concurrency)
            rounds: list[dict[str, Measured]] = []
            for turn in range(args.rounds + 1):
                found: dict[str, Measured] = {}
                # Each goes first in turn, and with new tasks: nothing is in a prefix cache but
                # what all begin with.
                for side in sorted(sides, reverse=turn % 2 == 0):
                    load = (
                        concurrency,
                        count,
                        args.most,
                        random.getrandbits(32),
                        (server.pid, args.pid),
                    )
                    found[side] = await measure(*sides[side], *load)
                rounds.append(found)
            print(row(concurrency, rounds[1:]), flush=True)  # the first warms up
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.wait(30)


def row(concurrency: int, rounds: Sequence[dict[str, Measured]]) -> str:
    """Of the table: what both came to in the same rounds."""
    straight, gateway = ([each[side] for each in rounds] for side in ("straight", "gateway"))
    ratios = [b.rate / a.rate for a, b in zip(straight, gateway, strict=True)]
    cells = [
        f"{concurrency}",
        *(f"{median(m.rate for m in side):.1f}" for side in (straight, gateway)),
        f"{median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})",
        *(f"{1000 * median(m.first for m in side):.0f} ms" for side in (straight, gateway)),
        *(
            f"{1e6 * median(m.vllm_cpu / m.tokens for m in side):.0f}"
            for side in (straight, gateway)
        ),
        f"{1e6 * median(m.gateway_cpu / m.tokens for m in gateway):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--pid", type=int, help="of `vllm serve`, to tell what it computes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int, default=32, help="new tokens of a request")
    parser.add_argument("--each", type=int, default=2, help="requests for each that runs at once")
    parser.add_argument("--least", type=int, default=8, help="requests of a round")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    asyncio.run(serve_gateway(args.url, args.model) if args.serve else run(args))


if __name__ == "__main__":
    main()
