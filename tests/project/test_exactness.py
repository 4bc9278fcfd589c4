"""Exact tokens from end to end: the demo's agent, over HTTP, with a real model."""

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
import pytest
import torch

from whet.app.composition.gateway_pool import GatewaySettings, open_gateway_pool
from whet.app.composition.gateway_server import Gateway
from whet.config import (
    GatewayConfig,
    LocalEngineConfig,
    LocalTrainerConfig,
    RunConfig,
    RunnerConfig,
)
from whet.demos.arithmetic import solve
from whet.demos.problems import problems
from whet.engines.local.engine import LocalEngine
from whet.engines.socket_engine import EngineServer
from whet.gateway.app import build_app
from whet.gateway.pipeline import CallPipeline
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.renderer import Renderer
from whet.io.server import AppServer
from whet.models.catalog import resolve_model
from whet.models.distribution import SamplingTransform, compute_log_probs
from whet.models.huggingface import LocalPolicy
from whet.protocols import Engine
from whet.runners.collector import QueueCollector
from whet.runners.endpoints import Endpoints
from whet.runners.runner import Runner
from whet.store.sqlite import SQLiteStore
from whet.training.rows import build_rows
from whet.types import Credit, Group, Rollout, Row, Sampling, TokenChunk

SECRET = b"secret"


class Witness(Engine):
    """The real engine, and a note of what it was given and what it gave."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self.seen: list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = []

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        stream: bool = False,
        affinity: str = "",
    ) -> AsyncGenerator[TokenChunk]:
        async for piece in self._engine.generate(prompt, sampling, stream=stream):
            assert piece.stop  # the agent does not stream: one piece is all of it
            self.seen.append((tuple(prompt), piece.tokens, piece.logprobs))
            yield piece

    async def close(self) -> None:
        await self._engine.close()


@asynccontextmanager
async def serve_in_process(
    engine: Engine, template: ChatTemplate, store: SQLiteStore, folder: Path
) -> AsyncGenerator[Endpoints]:
    pipeline = CallPipeline(
        engine=engine, log=store, renderer=Renderer(template), models=("policy",)
    )
    server = AppServer(build_app(pipeline, SECRET, GatewayConfig()))

    yield Gateway(server.url, SECRET, "policy")
    await engine.close()
    server.close()


@asynccontextmanager
async def serve_by_sockets(
    engine: Engine, template: ChatTemplate, store: SQLiteStore, folder: Path
) -> AsyncGenerator[Endpoints]:
    server = EngineServer(engine)
    settings = GatewaySettings(
        config=RunConfig(),
        model=resolve_model("tiny"),
        context_length=8192,
        secret=SECRET.hex(),
        store=folder / "store.db",
        run=store.run,
        judge=None,
        prepares=False,
        log_level=logging.WARNING,
    )
    async with open_gateway_pool(1, settings, server, store, print) as (_, endpoints):
        yield endpoints
    await server.close()
    await engine.close()


Serve = Callable[[Engine, ChatTemplate, SQLiteStore, Path], AbstractAsyncContextManager[Endpoints]]


async def sample_rows(
    policy: LocalPolicy, folder: Path, serve: Serve
) -> tuple[Witness, list[Row], int]:
    """Rows of 24 rollouts of the demo's agent; the third is how many calls they made."""
    template = ChatTemplate(policy.folder)
    engine = Witness(LocalEngine(policy, LocalEngineConfig(), template.decode, threads=1))
    async with (
        SQLiteStore(folder / "store.db") as store,
        serve(engine, template, store, folder) as endpoints,
    ):
        runner = Runner(solve, RunnerConfig(), store=store, endpoints=endpoints)
        rollouts = [
            Rollout(id=f"r{i}", group="g", task=task)
            for i, task in enumerate(problems("train", 24, 0))
        ]
        groups: list[Group] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runner.run)
            groups = await QueueCollector(queue=store, log=store).collect(rollouts)
            tasks.cancel_scope.cancel()
    trajectories = [t for group in groups for t in group]
    assert len(trajectories) == 24
    credits = [Credit(t, {c.generation_id(0): 1.0 for c in t.calls}) for t in trajectories]
    built = build_rows(credits)
    assert built.unproven == ()
    return engine, list(built.rows), sum(len(t.calls) for t in trajectories)


@pytest.mark.anyio
@pytest.mark.parametrize("serve", [serve_in_process, serve_by_sockets])
async def test_every_trained_token_is_one_the_engine_sampled_in_that_very_context(
    tmp_path: Path, serve: Serve
) -> None:
    config = LocalTrainerConfig(weights="full")
    policy = LocalPolicy(resolve_model("tiny"), config, device="cpu", seed=0)
    with anyio.fail_after(120):
        witness, rows, calls = await sample_rows(policy, tmp_path, serve)

    assert len(rows) == 24 < calls == len(witness.seen)
    trained = [
        (row.tokens[: span.start], row.tokens[span.start : span.end], span.logprobs)
        for row in rows
        for span in row.segments
    ]
    assert sorted(trained) == sorted(witness.seen)

    for row in rows:
        with torch.inference_mode():
            logits_LV = policy.model(torch.tensor([row.tokens])).logits[0]
        for span in row.segments:
            transform = SamplingTransform.from_settings(
                [(span.temperature, span.top_p, span.top_k)], "cpu"
            )
            fresh_NV = compute_log_probs(logits_LV[span.start - 1 : span.end - 1], transform)
            target_N1 = torch.tensor(row.tokens[span.start : span.end])[:, None]
            gap = fresh_NV.gather(1, target_N1)[:, 0] - torch.tensor(span.logprobs)
            assert gap.abs().max() < 1e-4
