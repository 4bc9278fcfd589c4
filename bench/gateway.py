"""Cost of recording every call exactly and durably, in requests per second and latency.

    python bench/gateway.py [--seconds 3] [--concurrency 1 16 64] [--tokens 100] [--chunk N]
    AGL_PYTHON=/path/to/venv/bin/python python bench/gateway.py

Conversations of several turns, in groups of eight that begin with the same task and continue each
in its own words, run against

1. the gateway: tokenizer and template of the tiny model, an engine with a constant answer, every
   call committed to a SQLite file before its reply ends;
2. a stub (`stub.py`): the same replies from an ASGI app that does nothing else, under the same
   server;
3. where AGL_PYTHON names an environment with it, Agent Lightning's proxy in front of that stub.

Each server is a process of its own, the load comes from another, and all are measured in the same
run, in turns: other load of the machine falls on each alike. At the end the CPU time is shown in
which the gateway renders a prompt and checks that it continues the stored one; `rendering.py`
measures it in longer conversations.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import uvloop
from load import Measured, ask, conversation, put_load
from pydantic import JsonValue
from stub import UNIQUE

from whet.app.cli.main import tune_gc
from whet.config import GatewayConfig
from whet.gateway import auth
from whet.gateway.app import build_app
from whet.gateway.graph import Turn
from whet.gateway.messages import Message
from whet.gateway.pipeline import CallPipeline
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.renderer import RenderedPrompt, Renderer
from whet.gateway.templates.suffix import Mismatch
from whet.io.server import AppServer
from whet.models.catalog import resolve_model
from whet.protocols import Engine
from whet.store.sqlite import SQLiteStore
from whet.types import Rollout, Sampling, StopReason, TokenChunk

TURNS = 4
GROUP = 8
"""Conversations that begin alike, as the rollouts of one task do."""
MODEL = "m"
SECRET = b"bench"
PREFIX = "bench: "
"""Prefix of a line that a server prints for the bench."""
PROMPT_COST = "prompt cost"
"""Line to which the gateway answers with the CPU time of a prompt, in milliseconds."""
FOLDER = Path(__file__).parent
AGL_LAUNCHER = FOLDER / "agl" / "proxy.py"
CALL = re.compile(rb"chatcmpl-[0-9a-f]{24}")
SLOW_MS = 8.0
"""Delay of each token, so that each is sent in its own event."""
MAX_ADDED_MS = 3
"""Goal for the median latency that the gateway adds to the stub's, one request at a time."""
MIN_TIMES_AGL = 30
"""Goal for the gateway's requests per second, as a multiple of Agent Lightning's proxy."""

Results = dict[tuple[str, int, bool], Measured]
"""By server, concurrency, and whether the requests are streamed."""


# --------------------------------------------------------------------------- the servers


class ConstantEngine(Engine):
    """Engine with a constant answer, streamed in chunks of `chunk` tokens.

    The answer is built beforehand, and without a delay it never waits: all time that a call takes
    is the gateway's.
    """

    def __init__(self, tokens: Sequence[int], delay_s: float, chunk: int) -> None:
        self._delay_s = delay_s
        self._whole = _build_chunk(tokens, stop="stop")
        last = (len(tokens) - 1) // chunk * chunk
        self._chunks = [
            *(_build_chunk(tokens[at : at + chunk]) for at in range(0, last, chunk)),
            _build_chunk(tokens[last:], stop="stop"),
        ]

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        stream: bool = False,
        affinity: str = "",
    ) -> AsyncGenerator[TokenChunk]:
        for chunk in self._chunks if stream else [self._whole]:
            if self._delay_s:
                await asyncio.sleep(self._delay_s * len(chunk.tokens))
            yield chunk

    async def close(self) -> None:
        pass


def _build_chunk(tokens: Sequence[int], stop: StopReason | None = None) -> TokenChunk:
    return TokenChunk(tuple(tokens), (-0.5,) * len(tokens), (0,) * len(tokens), stop=stop)


class TimedRenderer(Renderer):
    """A renderer that adds up the CPU time of its prompts."""

    prompts = 0
    seconds = 0.0

    def render_full(
        self, messages: Sequence[Message], tools: Sequence[JsonValue], now: float | None = None
    ) -> RenderedPrompt:
        begun = time.thread_time()
        prompt = super().render_full(messages, tools, now)
        self.seconds += time.thread_time() - begun
        self.prompts += 1
        return prompt

    def render_suffix(
        self,
        path: Sequence[Turn],
        messages: Sequence[Message],
        tools: Sequence[JsonValue],
        text: str | None = None,
    ) -> RenderedPrompt | Mismatch:
        begun = time.thread_time()
        prompt = super().render_suffix(path, messages, tools, text)
        self.seconds += time.thread_time() - begun
        self.prompts += 1
        return prompt


async def serve_gateway(folder: Path, tokens: int, delay_s: float, chunk: int) -> None:
    """Print the address; then, for each number read, make that many attempts."""
    tune_gc()  # as `whet serve` does
    template = ChatTemplate(resolve_model("tiny"))
    renderer = TimedRenderer(template)
    answer = [*(template.encode("2 + 3 = 5. " * tokens)[: tokens - 1]), renderer.stop_ids[0]]
    async with SQLiteStore(folder / "store.sqlite") as store:
        engine = ConstantEngine(answer, delay_s, chunk)
        pipeline = CallPipeline(engine=engine, log=store, renderer=renderer, models=(MODEL,))
        server = AppServer(build_app(pipeline, SECRET, GatewayConfig()))
        report(server.url)
        made = 0
        while line := await asyncio.to_thread(sys.stdin.readline):
            if line.strip() == PROMPT_COST:
                report(str(1000 * renderer.seconds / renderer.prompts))
                continue
            wanted = [
                Rollout(id=f"r{made + i}", task=None, group="g", timeout_s=86_400)
                for i in range(int(line))
            ]
            made += len(wanted)
            await store.enqueue(wanted)
            claims = (store.claim("bench", lease_s=86_400, wait_s=0) for _ in wanted)
            places: list[tuple[str, str]] = []
            for attempt in await asyncio.gather(*claims):
                assert attempt is not None
                path = f"/rollout/{attempt.rollout.id}/attempt/{attempt.id}/v1/chat/completions"
                places.append((path, auth.mint_key(attempt.id, SECRET)))
            report(json.dumps(places))
        server.close()


def report(line: str) -> None:
    print(PREFIX + line, flush=True)


@dataclass(frozen=True)
class Server:
    process: "subprocess.Popen[str]"
    address: str

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return read_line(self.process)


def read_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    while line := process.stdout.readline():
        if line.startswith(PREFIX):
            return line.removeprefix(PREFIX).strip()
    raise SystemExit(f"a server stopped early: {process.args}")


@contextmanager
def started(*command: str | Path, errors: IO[str] | None = None) -> Generator[Server]:
    process = subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )
    try:
        yield Server(process, read_line(process))
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


# --------------------------------------------------------------------------- the comparison


def bodies(answer: str, number: int, *, stream: bool, **more: object) -> list[bytes]:
    """A conversation's requests, with the turns before each as an SDK would echo them."""
    numbers = " ".join(map(str, range(40)))
    messages = [
        {"role": "system", "content": "You are a careful assistant."},
        {"role": "user", "content": f"Task {number // GROUP}: add these numbers: {numbers}"},
    ]
    requests: list[bytes] = []
    for turn in range(TURNS):
        request = {"model": MODEL, "messages": messages, "temperature": 0.7, "max_tokens": 100}
        request |= ({"stream": True} if stream else {}) | more
        requests.append(json.dumps(request).encode())
        messages = [
            *messages,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": f"And now number {turn} of {number}."},
        ]
    return requests


class Bench:
    """The servers of a comparison."""

    def __init__(self, stack: ExitStack, folder: Path, options: argparse.Namespace) -> None:
        self._stack = stack
        self._folder = folder
        self._options = options
        self.servers = {"gateway": self._gateway(folder, options.delay_ms, options.chunk)}
        self._answer = ""
        self._begun = 0
        """Conversations so far: no two measurements share tasks."""

    async def prepare(self) -> None:
        """Capture the replies of a slow gateway, which the stub repeats token by token."""
        slow = self._folder / "slow"
        slow.mkdir()
        gateway = self._gateway(slow, SLOW_MS, chunk=1)
        reply = json.loads(await self._capture(gateway, "plain", stream=False))
        self._answer = reply["choices"][0]["message"]["content"]
        await self._capture(gateway, "plain", stream=True)
        self.servers["stub"] = self._stub("plain")
        if python := os.environ.get("AGL_PYTHON"):
            wanted = {"return_token_ids": True, "logprobs": True}
            await self._capture(gateway, "vllm", stream=False, **wanted)
            await self._capture(gateway, "vllm", stream=True, **wanted)
            upstream = self._stub("vllm")
            log = self._stack.enter_context((self._folder / "agl.log").open("w"))
            command = (python, AGL_LAUNCHER, upstream.address + "/v1", MODEL)
            self.servers["agl"] = self._stack.enter_context(started(*command, errors=log))

    async def measure(
        self, name: str, concurrency: int, seconds: float, *, stream: bool
    ) -> Measured:
        server = self.servers[name]
        count = 8 + int(seconds * 4000 / TURNS)
        if name == "stub":
            places = [("/v1/chat/completions", "x")] * count
        else:
            count = min(count, 8 + int(seconds * 50)) if name == "agl" else count
            places = json.loads(server.ask(str(max(count, concurrency))))
        conversations = [
            conversation(path, key, bodies(self._answer, number, stream=stream))
            for number, (path, key) in enumerate(places, self._begun)
        ]
        self._begun += len(places)
        return await put_load(
            server.address,
            server.process.pid,
            conversations,
            concurrency=concurrency,
            seconds=seconds,
        )

    async def _capture(self, gateway: Server, name: str, *, stream: bool, **more: object) -> bytes:
        [(path, key)] = json.loads(gateway.ask("1"))
        [request, *_] = conversation(path, key, bodies("", 0, stream=stream, **more))
        body = await ask(gateway.address, request)
        body = CALL.sub(UNIQUE, unchunked(body) if stream else body)
        place = self._folder / name / ("events" if stream else "whole")
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(body)
        return body

    def _gateway(self, folder: Path, delay_ms: float, chunk: int) -> Server:
        size = ("--tokens", str(self._options.tokens), "--chunk", str(chunk))
        delay = ("--delay-ms", str(delay_ms))
        command = (sys.executable, __file__, "--serve-in", folder, *size, *delay)
        return self._stack.enter_context(started(*command))

    def _stub(self, replies: str) -> Server:
        command = (sys.executable, FOLDER / "stub.py", self._folder / replies)
        return self._stack.enter_context(started(*command))


def unchunked(body: bytes) -> bytes:
    plain = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        plain += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    return plain


async def bench(options: argparse.Namespace) -> None:
    results: Results = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="whet-bench-")))
        servers = Bench(stack, folder, options)
        await servers.prepare()
        names = list(servers.servers)
        for name in names:
            await servers.measure(name, 1, 0, stream=False)  # warm
        turns = [(name, stream) for stream in (False, True) for name in names]
        for concurrency in options.concurrency:
            for name, stream in turns * options.rounds:
                seconds = options.seconds / options.rounds
                measured = await servers.measure(name, concurrency, seconds, stream=stream)
                key = name, concurrency, stream
                results[key] = results.get(key, Measured()) + measured
        size = (folder / "store.sqlite").stat().st_size
        prompt_ms = float(servers.servers["gateway"].ask(PROMPT_COST))
    show(results, options)
    calls = sum(len(m.latencies) for (name, *_), m in results.items() if name == "gateway")
    print(f"\n{calls} calls recorded; the store's file is {size / 2**20:.0f} MiB\n")
    check_goals(results, options)
    print(
        f"     prompt rendered and checked in {prompt_ms:.2f} ms of the gateway's CPU time a call"
    )


def show(results: Results, options: argparse.Namespace) -> None:
    load = os.getloadavg()[0]
    print(
        f"{options.tokens} tokens a reply, {TURNS} turns a conversation, "
        f"{options.delay_ms:g} ms a token, {options.chunk} a chunk, "
        f"{os.cpu_count()} cores, load average {load:.1f}\n"
    )
    header = f"{'at once':>7} {'':6} {'server':9} {'req/s':>8} {'p50 ms':>8} {'p99 ms':>8} "
    print(header + f"{'first ms':>9} {'cpu ms':>7} {'of stub':>8} {'added p50':>10}")
    for (name, concurrency, stream), m in results.items():
        stub = results["stub", concurrency, stream]
        first = 1000 * statistics.median(m.first_bytes)
        added = m.latency_ms(0.5) - stub.latency_ms(0.5)
        print(
            f"{concurrency:7} {'stream' if stream else 'plain':6} {name:9} "
            f"{m.per_second:8.0f} {m.latency_ms(0.5):8.2f} {m.latency_ms(0.99):8.2f} "
            f"{first:9.2f} {m.cpu_ms:7.2f} {m.per_second / stub.per_second:8.2f} "
            f"{added:10.2f}"
        )


def check_goals(results: Results, options: argparse.Namespace) -> None:
    """Print each goal and whether it is met."""
    many = 16 if 16 in options.concurrency else options.concurrency[-1]
    if 1 in options.concurrency:
        gateway, stub = results["gateway", 1, False], results["stub", 1, False]
        added = gateway.latency_ms(0.5) - stub.latency_ms(0.5)
        print_goal(f"added p50 at 1: {added:.2f} ms", added < MAX_ADDED_MS, f"< {MAX_ADDED_MS} ms")
    for stream in (False, True):
        if (agl := results.get(("agl", many, stream))) is not None:
            ratio = results["gateway", many, stream].per_second / agl.per_second
            kind = "streamed" if stream else "plain"
            text = f"times the requests/s of Agent Lightning at {many}, {kind}: {ratio:.3g}"
            print_goal(text, ratio >= MIN_TIMES_AGL, f"at least {MIN_TIMES_AGL}")
    if "AGL_PYTHON" not in os.environ:
        print("AGL_PYTHON is not set: no comparison with Agent Lightning's proxy")


def print_goal(text: str, met: bool, goal: str) -> None:
    print(f"{'ok  ' if met else 'MISS'} {text} ({goal})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="of load for each number")
    parser.add_argument("--rounds", type=int, default=2, help="in which the servers take turns")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=100, help="of a reply")
    parser.add_argument(
        "--chunk",
        type=int,
        help="tokens of a chunk; default: one if there is a delay, else the whole reply",
    )
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of the engine for each token")
    parser.add_argument("--serve-in", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.chunk is None:
        options.chunk = 1 if options.delay_ms else options.tokens
    if options.serve_in:
        delay_s = options.delay_ms / 1000
        asyncio.run(serve_gateway(options.serve_in, options.tokens, delay_s, options.chunk))
    else:
        uvloop.run(bench(options))


if __name__ == "__main__":
    main()
