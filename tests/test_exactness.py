"""The promise, end to end: the demo's own agent, over HTTP, with a real model."""

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import anyio
import pytest
import torch

from whet.config import EngineConfig, GatewayConfig, RunnerConfig, TrainerConfig
from whet.demos.arithmetic import solve
from whet.demos.problems import problems
from whet.engines.local import LocalEngine
from whet.gateway import keys
from whet.gateway.app import build_app
from whet.gateway.render import Renderer
from whet.gateway.service import Service
from whet.gateway.template import ChatTemplate
from whet.policies.catalogue import resolve_model
from whet.policies.distribution import Shaping, log_probs
from whet.policies.local import LocalPolicy
from whet.protocols import Engine
from whet.rows import build_rows
from whet.runners.collect import QueueCollector
from whet.runners.gateways import OwnGateway
from whet.runners.local import LocalRunner
from whet.serving import AppServer
from whet.store.sqlite import SQLiteStore
from whet.types import Attempt, Credit, Endpoint, Piece, Rollout, Row, Sampling

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
    ) -> AsyncGenerator[Piece]:
        async for piece in self._engine.generate(prompt, sampling, stream=stream):
            assert piece.stop  # the agent does not stream: one piece is all of it
            self.seen.append((tuple(prompt), piece.tokens, piece.logprobs))
            yield piece

    async def close(self) -> None:
        await self._engine.close()


async def sample_rows(policy: LocalPolicy, folder: Path) -> tuple[Witness, list[Row], int]:
    """Rows of 24 rollouts of the demo's agent; the third is how many calls they made."""
    template = ChatTemplate(policy.folder)
    engine = Witness(LocalEngine(policy, EngineConfig(), template.decode, threads=1))
    async with SQLiteStore(folder / "store.db") as store:
        service = Service(engine=engine, log=store, renderer=Renderer(template), models=("policy",))
        server = AppServer(build_app(service, SECRET, GatewayConfig()))

        def endpoint(attempt: Attempt) -> Endpoint:
            path = f"/rollout/{attempt.rollout.id}/attempt/{attempt.id}/v1"
            key = keys.mint(attempt.id, SECRET)
            return Endpoint(base_url=server.url + path, api_key=key, model="policy")

        runner = LocalRunner(solve, RunnerConfig(), store=store, gateways=OwnGateway(endpoint))
        rollouts = [
            Rollout(id=f"r{i}", group="g", task=task)
            for i, task in enumerate(problems("train", 24, 0))
        ]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runner.run)
            groups = await QueueCollector(queue=store, log=store).collect(rollouts)
            tasks.cancel_scope.cancel()
        await engine.close()
        server.close()
    trajectories = [t for group in groups for t in group]
    assert len(trajectories) == 24
    credits = [Credit(t, {c.generation_id(0): 1.0 for c in t.calls}) for t in trajectories]
    built = build_rows(credits)
    assert built.unproven == ()
    return engine, list(built.rows), sum(len(t.calls) for t in trajectories)


@pytest.mark.anyio
async def test_every_trained_token_is_one_the_engine_sampled_in_that_very_context(
    tmp_path: Path,
) -> None:
    policy = LocalPolicy(resolve_model("tiny"), TrainerConfig(weights="full"), device="cpu", seed=0)
    with anyio.fail_after(120):
        witness, rows, calls = await sample_rows(policy, tmp_path)

    assert len(rows) == 24 < calls == len(witness.seen)
    trained = [
        (row.tokens[: span.start], row.tokens[span.start : span.end], span.logprobs)
        for row in rows
        for span in row.spans
    ]
    assert sorted(trained) == sorted(witness.seen)

    for row in rows:
        with torch.inference_mode():
            logits_LV = policy.model(torch.tensor([row.tokens])).logits[0]
        for span in row.spans:
            shaping = Shaping.of([(span.temperature, span.top_p, span.top_k)], "cpu")
            fresh_NV = log_probs(logits_LV[span.start - 1 : span.end - 1], shaping)
            target_N1 = torch.tensor(row.tokens[span.start : span.end])[:, None]
            gap = fresh_NV.gather(1, target_N1)[:, 0] - torch.tensor(span.logprobs)
            assert gap.abs().max() < 1e-4
