"""strands-vllm that calls a server directly: the tokens in its spans are trained."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from integrations.sdks.agent_run import PATIENCE_S, RUN, TOKEN, Runner, start_runner
from integrations.sdks.environments import python_of
from integrations.sdks.recipes import EXAMPLES, SUITE
from whet.algorithms.grpo import GRPO
from whet.app.composition.gateway_server import serve_gateway
from whet.app.composition.samplers import open_local_sampler
from whet.config import LocalTrainerConfig, resolve
from whet.demos.problems import problems
from whet.engines.scorer import LocalScorer
from whet.errors import ConfigError
from whet.gateway import auth
from whet.io.genai_spans import add_calls_from_spans
from whet.models.catalog import resolve_model
from whet.models.huggingface import LocalPolicy
from whet.runners.diagnostics import read_warnings
from whet.store.sqlite import SQLiteStore
from whet.trainers.local import LocalTrainer
from whet.training.rows import build_rows, normalize
from whet.types import Rollout

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

TASKS, GROUP = 3, 6
CONFIG = resolve({"trainer": {"weights": "full"}, "gateway": {"allow_unattributed": True}})


@asynccontextmanager
async def run_to_end(agent: str, folder: Path) -> AsyncGenerator[tuple[SQLiteStore, LocalPolicy]]:
    """A store whose rollouts an agent has all ended, and the policy it was served.

    Its server is a gateway that records nothing: it returns token ids as vLLM does.
    """
    assert isinstance(CONFIG.trainer, LocalTrainerConfig)
    policy = LocalPolicy(resolve_model("tiny"), CONFIG.trainer, device="cpu", seed=1)
    runner = Runner(python_of("strands-vllm"), agent, {}, tracer="otel")
    async with (
        SQLiteStore(folder / "store.db", run=RUN) as store,
        open_local_sampler(policy, CONFIG) as engine,
        serve_gateway({"": engine}, CONFIG, store, auth.derive_secret(TOKEN, RUN)) as server,
    ):
        await store.publish("vllm", server.own_endpoint.model_dump())
        rollouts = [
            Rollout(id=f"{task}-{n}", group=f"{task}", task=problem, resources={"vllm": "latest"})
            for task, problem in enumerate(problems("train", TASKS, seed=2))
            for n in range(GROUP)
        ]
        await store.enqueue(rollouts)
        with start_runner(runner, store, "none", folder), anyio.fail_after(PATIENCE_S):
            await store.wait([rollout.id for rollout in rollouts])
        yield store, policy


async def test_its_recorders_tokens_are_trained_a_row_for_each_call(tmp_path: Path) -> None:
    agent = f"{EXAMPLES.parent / 'direct_vllm' / 'agent.py'}:solve"
    async with run_to_end(agent, tmp_path) as (store, policy):
        ids = [f"{task}-{n}" for task in range(TASKS) for n in range(GROUP)]
        found = await store.trajectories(ids)
        assert len(found) == TASKS * GROUP
        assert not any(trajectory.calls for trajectory in found)
        assert await read_warnings(store) == {}
        found = await add_calls_from_spans(found, store, LocalScorer(policy), version=0)
        groups = [[t for t in found if t.attempt.rollout.group == f"{n}"] for n in range(TASKS)]
        credits = await GRPO(CONFIG.algorithm).credit(groups, [])
        built = build_rows(credits)
        assert credits
        assert built.unproven == ()
        assert len(built.rows) == sum(len(each.trajectory.calls) for each in credits)
        assert any(len(trajectory.calls) > 1 for trajectory in found), "it came to a second turn"
        trainer = LocalTrainer(policy)
        rows = normalize(built.rows, CONFIG.loss, rollouts=1)
        metrics = await trainer.forward_backward(rows, CONFIG.loss)
        await trainer.optim_step(CONFIG.adam.build_step(0, CONFIG.steps, "lora"))
        assert metrics["logprob_gap"] < 1e-4


async def test_a_forgotten_setting_is_reported_with_the_call(tmp_path: Path) -> None:
    agent = f"{SUITE / 'bad_defaults.py'}:without_token_ids"
    async with run_to_end(agent, tmp_path) as (store, policy):
        [warning] = (await read_warnings(store)).values()
        [trajectory] = await store.trajectories(["0-0"])
        with pytest.raises(ConfigError) as error:
            await add_calls_from_spans([trajectory], store, LocalScorer(policy), version=0)
    for text in (warning, str(error.value)):
        assert "call 'chat' (span " in text
        assert "for model 'policy', and its span has no llm.hosted_vllm.prompt_token_ids" in text
        assert "VLLMModel(..., return_token_ids=True)" in text
