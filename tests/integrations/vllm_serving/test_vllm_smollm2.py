"""A model of a real size through vLLM: whole conversations, and the trainer's view of them."""

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import anyio
import pytest
from openai import AsyncOpenAI

from support.servers.real_vllm import NEEDS_VLLM, Launch
from whet.app.composition.gateway_server import Gateway
from whet.config import GatewayConfig, LocalTrainerConfig
from whet.demos.problems import problems
from whet.engines.remote.connect import connect_servers
from whet.engines.scorer import LocalScorer
from whet.gateway.app import build_app
from whet.gateway.pipeline import CallPipeline
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.renderer import Renderer
from whet.io.server import AppServer
from whet.models.catalog import SMOLLM2, find_models_dir, read_model_context
from whet.models.huggingface import LocalPolicy
from whet.store.sqlite import SQLiteStore
from whet.training.rows import build_rows
from whet.types import Attempt, Credit, Endpoint, Outcome, Rollout, Row

FOLDER = find_models_dir() / SMOLLM2

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    NEEDS_VLLM,
    pytest.mark.skipif(not FOLDER.exists(), reason="smollm2 is not here: whet models get smollm2"),
]

CONVERSATIONS, TURNS = 4, 3
SECRET = b"secret"


async def test_logprobs_of_conversations_are_those_of_the_trainer(
    launch: Launch, tmp_path: Path
) -> None:
    server = launch(FOLDER, "--max-model-len", "2048")
    template = ChatTemplate(FOLDER)
    with anyio.fail_after(900):
        engine = await connect_servers(
            "vllm",
            [server.url],
            template.decode,
            context_length=read_model_context(FOLDER),
            startup_error=server.find_startup_error,
            progress=print,
        )
    server.mark_ready()
    async with SQLiteStore(tmp_path / "store.db") as store:
        pipeline = CallPipeline(
            engine=engine, log=store, renderer=Renderer(template), models=("policy",)
        )
        gateway = AppServer(build_app(pipeline, SECRET, GatewayConfig()))
        rows = await conversations(store, gateway.url)
        await engine.close()
        await anyio.to_thread.run_sync(gateway.close)
    assert [len(row.segments) for row in rows] == [TURNS] * CONVERSATIONS
    policy = LocalPolicy(FOLDER, LocalTrainerConfig(), device="cpu", seed=0)
    scored = await LocalScorer(policy).logprobs([row.tokens for row in rows])
    gaps = [
        abs(theirs - ours)
        for row, logprobs in zip(rows, scored, strict=True)
        for span in row.segments
        for theirs, ours in zip(span.logprobs, logprobs[span.start - 1 : span.end - 1], strict=True)
    ]
    sys.stdout.write(f"log-prob gap of vLLM and trainer, smollm2: mean {fmean(gaps):.1e}, ")
    sys.stdout.write(f"most {max(gaps):.1e}, of {len(gaps)} tokens\n")
    assert max(gaps) < 1e-2


async def conversations(store: SQLiteStore, url: str) -> list[Row]:
    """Some at once; what they come to as rows."""
    ids = [f"r{number}" for number in range(CONVERSATIONS)]
    await store.enqueue([Rollout(id=id, task={}, group="g") for id in ids])
    endpoint = Gateway(url, SECRET, "policy").endpoint
    async with anyio.create_task_group() as tasks:
        for number in range(CONVERSATIONS):
            attempt = await store.claim("w", lease_s=900, wait_s=0)
            assert attempt
            tasks.start_soon(converse, store, attempt, endpoint(attempt), number)
    built = build_rows([Credit.even(t, 1.0) for t in await store.trajectories(ids)])
    assert built.unproven == ()
    return list(built.rows)


async def converse(store: SQLiteStore, attempt: Attempt, llm: Endpoint, seed: int) -> None:
    messages: list[Any] = []
    async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, timeout=900) as client:
        for task in problems("train", TURNS, seed):
            messages.append({"role": "user", "content": task["question"]})
            reply = await client.chat.completions.create(
                model=llm.model, messages=messages, max_tokens=32
            )
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    await store.finish(attempt.id, Outcome(reward=1.0))
