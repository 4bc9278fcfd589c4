"""whet with a real vLLM: exact continuation, weights, failures, and training."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp
import anyio
import pytest
from openai import AsyncOpenAI

from support.models.tiny_llama import nudge, plain_logprobs
from support.servers.real_vllm import NEEDS_VLLM, ON_A_CPU, PROGRAM
from whet.app.composition.gateway_server import Gateway
from whet.config import GatewayConfig, LocalTrainerConfig
from whet.demos.problems import CALCULATOR, SYSTEM, problems, use_tool
from whet.engines.remote.connect import connect_servers
from whet.engines.remote.engine import JsonMap, RemoteEngine
from whet.engines.remote.launch import VLLMProcess
from whet.engines.remote.replicas import WeightsSpec
from whet.engines.remote.vllm import COMPLETIONS_PATH, VLLM
from whet.engines.request import SampledTokens, SampleRequest
from whet.gateway.app import build_app
from whet.gateway.pipeline import CallPipeline
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.renderer import Renderer
from whet.io.server import AppServer
from whet.models.catalog import TINY
from whet.models.export import write_adapter
from whet.models.huggingface import LocalPolicy
from whet.store.sqlite import SQLiteStore
from whet.training.rows import build_rows
from whet.types import Credit, Outcome, Rollout, Sampling

pytestmark = [pytest.mark.anyio, pytest.mark.slow, NEEDS_VLLM]

TEMPLATE = ChatTemplate(TINY)
PROMPT = TEMPLATE.encode("A long story about 12 pens and 32 more pens, from the beginning:")
SECRET = b"secret"


@pytest.fixture
async def engine(replicas: list[VLLMProcess]) -> AsyncGenerator[RemoteEngine]:
    with anyio.fail_after(900):
        engine = await join(replicas)
    yield engine
    await engine.close()


async def join(servers: list[VLLMProcess]) -> RemoteEngine:
    def alive() -> str | None:
        return next((why for server in servers if (why := server.find_startup_error())), None)

    urls = [server.url for server in servers]
    engine = await connect_servers(
        "vllm", urls, TEMPLATE.decode, context_length=1024, startup_error=alive, progress=print
    )
    for server in servers:
        server.mark_ready()
    return engine


async def ask(
    engine: RemoteEngine, **sampling: Any
) -> tuple[tuple[int, ...], list[float], set[int]]:
    chunks = engine.generate(PROMPT, Sampling(**sampling))
    async with aclosing(chunks):
        [chunk] = [chunk async for chunk in chunks]
    return chunk.tokens, list(chunk.logprobs), set(chunk.versions)


def adapter_of(policy: LocalPolicy, folder: Path) -> WeightsSpec:
    """The policy's adapter as a server loads it."""
    name = f"v{policy.version}-{os.urandom(3).hex()}"
    policy.write_weights(folder / f"{name}.safetensors")
    write_adapter(folder / f"{name}.safetensors", folder / name, policy.config, base=TINY)
    return WeightsSpec(policy.version, "lora", folder / name, name)


# ------------------------------------------------------------------- exactness


class RecordingVLLM(VLLM):
    """vLLM's wire format, recording the token ids of prompts and replies."""

    seen: list[tuple[list[int], list[int]]]

    def parse_reply(self, reply: JsonMap, request: SampleRequest) -> SampledTokens:
        [choice] = reply["choices"]
        self.seen.append((choice["prompt_token_ids"], choice["token_ids"]))
        return super().parse_reply(reply, request)


async def test_five_tool_turns_are_continued_from_the_very_tokens(
    engine: RemoteEngine, tmp_path: Path
) -> None:
    server = engine._server
    server.__class__ = RecordingVLLM
    assert isinstance(server, RecordingVLLM)
    server.seen, server.path = [], COMPLETIONS_PATH
    async with SQLiteStore(tmp_path / "store.db") as store:
        await store.enqueue([Rollout(id="r", task={}, group="g")])
        attempt = await store.claim("w", lease_s=600, wait_s=0)
        assert attempt
        renderer = Renderer(TEMPLATE)
        pipeline = CallPipeline(engine=engine, log=store, renderer=renderer, models=("policy",))
        gateway = AppServer(build_app(pipeline, SECRET, GatewayConfig()))
        endpoint = Gateway(gateway.url, SECRET, "policy").endpoint(attempt)
        turns = await converse(AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key))
        await store.finish(attempt.id, Outcome(reward=1.0))
        [trajectory] = await store.trajectories(["r"])
        await engine.close()
        await anyio.to_thread.run_sync(gateway.close)
    assert turns >= 5
    built = build_rows([Credit.even(trajectory, 1.0)])
    assert built.unproven == ()
    [row] = built.rows
    assert len(row.segments) == len(server.seen)
    for span, (prompt, tokens) in zip(row.segments, server.seen, strict=True):
        assert list(row.tokens[: span.start]) == prompt, "vLLM was given what is trained"
        assert list(row.tokens[span.start : span.end]) == tokens


async def converse(client: AsyncOpenAI) -> int:
    """Ask one thing after the other in one conversation; returns how often the tool was used."""
    tools: list[Any] = [CALCULATOR]
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    turns = 0
    async with client:
        for task in problems("train", 40, 3):
            messages.append({"role": "user", "content": task["question"]})
            for _ in range(3):
                reply = await client.chat.completions.create(
                    model="policy", messages=messages, tools=tools, max_tokens=40
                )
                message = reply.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls or []:
                    assert call.type == "function"
                    result = use_tool(call.function.name, call.function.arguments)
                    tool_message = {"role": "tool", "tool_call_id": call.id, "content": result}
                    messages.append(tool_message)
                    turns += 1
                if not message.tool_calls:
                    break
            if turns >= 5:
                break
    return turns


async def test_logprobs_are_those_of_the_trainer(engine: RemoteEngine, tmp_path: Path) -> None:
    policy = LocalPolicy(TINY, LocalTrainerConfig(), device="cpu", seed=0)
    nudge(policy, size=0.05)
    await engine.load(adapter_of(policy, tmp_path))
    gaps: list[float] = []
    for seed in range(4):
        shapes: list[Any] = [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0}]
        for shape in shapes:
            sampling = Sampling(max_tokens=40, seed=seed, **shape)
            tokens, logprobs, _ = await ask(engine, **sampling.model_dump())
            wanted = plain_logprobs(policy, PROMPT, tokens, sampling)
            gaps += [abs(a - b) for a, b in zip(wanted, logprobs, strict=True)]
    sys.stdout.write(f"log-prob gap of vLLM and trainer: mean {fmean(gaps):.1e}, ")
    sys.stdout.write(f"most {max(gaps):.1e}, of {len(gaps)} tokens\n")
    assert max(gaps) < 1e-3


async def test_a_schema_is_followed(engine: RemoteEngine) -> None:
    grammar = 'start: %json {"enum": ["seventeen", "forty-two"]}'
    for seed in range(4):
        tokens, _, _ = await ask(engine, grammar=grammar, seed=seed, stop_ids=(2,), max_tokens=30)
        assert tokens[-1] == 2
        assert json.loads(TEMPLATE.decode(tokens[:-1])) in ("seventeen", "forty-two")


# ------------------------------------------------------------------- weights


async def test_adapters_are_swapped_under_a_generation_without_touching_it(
    engine: RemoteEngine, tmp_path: Path
) -> None:
    policy = LocalPolicy(TINY, LocalTrainerConfig(), device="cpu", seed=0)
    versions: list[set[int]] = []
    for step in range(3):
        nudge(policy, seed=step, size=0.05)
        early = engine.generate(PROMPT, Sampling(max_tokens=200), stream=True, affinity="a")
        before = engine.version
        async with aclosing(early):
            first = await anext(early)
            await engine.load(adapter_of(policy, tmp_path))
            tokens, logprobs, now = await ask(engine, max_tokens=20)
            versions.append(now)
            rest = [chunk async for chunk in early]
        assert {v for chunk in (first, *rest) for v in chunk.versions} == {before}
        wanted = plain_logprobs(policy, PROMPT, tokens, Sampling())
        assert logprobs == pytest.approx(wanted, abs=1e-3), "the new weights answer"
    assert versions == [{1}, {2}, {3}]


# ------------------------------------------------------------------- failures


async def running(url: str) -> tuple[float, float]:
    """Requests that a server works on, and tokens it has sampled."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    names = ("vllm:num_requests_running", "vllm:generation_tokens_total")
    found = [sum(float(line.split()[-1]) for line in lines if line.startswith(n)) for n in names]
    return found[0], found[1]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_disconnects_stops_the_sampling(
    engine: RemoteEngine, replicas: list[VLLMProcess], stream: bool
) -> None:
    begun = engine.generate(PROMPT, Sampling(max_tokens=900), stream=stream)
    with anyio.move_on_after(0.5):
        await anext(begun)
    await begun.aclose()
    await anyio.sleep(1)
    at_once = [await running(server.url) for server in replicas]
    await anyio.sleep(1)
    later = [await running(server.url) for server in replicas]
    assert [working for working, _ in at_once] == [0, 0]
    assert at_once == later
    assert (await ask(engine, max_tokens=2))[2] == {engine.version}


async def test_a_killed_replica_is_survived_and_comes_back(
    engine: RemoteEngine, replicas: list[VLLMProcess], tmp_path: Path
) -> None:
    policy = LocalPolicy(TINY, LocalTrainerConfig(), device="cpu", seed=0)
    nudge(policy, size=0.05)
    await engine.load(adapter_of(policy, tmp_path))
    killed = engine._replicas.all[0]
    group = server_group(replicas[0])
    answers: list[set[int]] = []

    async def keep_asking() -> None:
        for _ in range(12):
            answers.append((await ask(engine, max_tokens=30))[2])

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(keep_asking)
        await anyio.sleep(0.3)
        os.killpg(group, signal.SIGKILL)
    assert answers == [{1}] * 48, "nobody noticed"
    assert not killed.up
    with anyio.fail_after(600):
        while not killed.up:  # noqa: ASYNC110 - it starts in another process
            await anyio.sleep(0.5)
    assert killed.weights.version == 1, "it has the weights before it is asked again"


def server_group(server: VLLMProcess) -> int:
    watchdog = str(server._watchdog.pid)
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", watchdog], capture_output=True, text=True, check=True
    )
    return int(listed.stdout)


# ------------------------------------------------------------------- training


def test_the_same_training_learns_as_much_on_both_engines(tmp_path: Path) -> None:
    gains = {}
    for kind in ("local", "vllm"):
        flags = ["--engine.command", str(PROGRAM)] if kind == "vllm" else []
        after = ["--", "--enforce-eager"] if kind == "vllm" else []
        command = [sys.executable, "-m", "whet", "demo", "--json", "--engine", kind, *flags]
        command += ["--dir", str(tmp_path / kind), "--trainer.weights", "lora", "--adam.lr", "2e-3"]
        ended = subprocess.run(
            [*command, "--steps", "8", *after],
            capture_output=True,
            text=True,
            timeout=1500,
            env=os.environ | ON_A_CPU,
        )
        assert ended.returncode == 0, ended.stderr[-2000:]
        report = json.loads(ended.stdout.splitlines()[-1])
        assert report["unproven_generations"] == report["failed_rollouts"] == 0
        gains[kind] = report["after"]["greedy"] - report["before"]["greedy"]
        sys.stdout.write(f"{kind}: greedy {report['before']['greedy']:.3f} -> ")
        sys.stdout.write(f"{report['after']['greedy']:.3f}, rewards {report['rewards']}\n")
    assert gains["local"] > 0.1
    assert gains["vllm"] > 0.1
    assert abs(gains["local"] - gains["vllm"]) < 0.2
