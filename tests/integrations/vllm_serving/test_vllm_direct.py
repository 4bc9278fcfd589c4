"""strands-vllm calls a real vLLM directly, and its recorder's tokens are trained."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from integrations.sdks.agent_run import RUN, TOKEN, Runner, start_runner
from integrations.sdks.environments import python_of
from integrations.sdks.recipes import ROOT
from support.servers.real_vllm import NEEDS_VLLM
from whet.engines.remote.engine import wait_until_healthy
from whet.engines.remote.launch import VLLMProcess
from whet.io.http_client import HttpClient
from whet.models.catalog import TINY
from whet.runners.diagnostics import read_warnings
from whet.store.sqlite import SQLiteStore

pytestmark = [pytest.mark.anyio, pytest.mark.slow, NEEDS_VLLM]

EXAMPLE = ROOT / "examples" / "direct_vllm"
STEPS = 2


async def test_a_recorders_tokens_are_trained_and_what_is_learned_is_served(
    replicas: list[VLLMProcess], tmp_path: Path
) -> None:
    vllm = replicas[0]
    await wait_until_ready(vllm)
    agent = f"{EXAMPLE / 'agent.py'}:solve"
    runner = Runner(python_of("strands-vllm"), agent, {}, concurrency=16, tracer="otel")
    async with SQLiteStore(tmp_path / "store.db", run=RUN) as store:
        with start_runner(runner, store, "none", tmp_path) as started:
            flags = ("--store", started.store, "--name", RUN, "--steps", str(STEPS))
            command = (sys.executable, EXAMPLE / "train.py", vllm.url, TINY, *flags)
            learned = partial(
                subprocess.run,
                command,
                cwd=tmp_path,
                env=os.environ | {"WHET_STORE_TOKEN": TOKEN},
                capture_output=True,
                text=True,
                timeout=900,
            )
            ended = await to_thread.run_sync(learned)
        assert ended.returncode == 0, ended.stderr + started.log.read_text()
        sys.stdout.write(ended.stdout)
        steps = await store.steps()
        for step in steps:
            assert step.metrics["failed_rollouts"] == step.metrics["unproven_generations"] == 0
            assert step.metrics["rows"] > 0
            assert step.metrics["calls_per_row"] == 1, "a row for each call"
        assert [step.version for step in steps] == [1, 2]
        assert [await read_models(store, step.consumed) for step in steps] == [
            {str(TINY)},
            {"whet-1"},
        ]
        assert await read_warnings(store) == {}


async def wait_until_ready(server: VLLMProcess) -> None:
    http = HttpClient()
    with anyio.fail_after(900):
        await wait_until_healthy(
            http, server.url, name="vLLM", startup_error=server.find_startup_error, progress=print
        )
    server.mark_ready()
    await http.close()


async def read_models(store: SQLiteStore, rollouts: tuple[str, ...]) -> set[str]:
    """The models that served the calls of rollouts, without what makes names unique."""
    spans = [
        span
        for trajectory in await store.trajectories(rollouts)
        for span in await store.spans(trajectory.attempt.id)
        if span.attributes.get("gen_ai.operation.name") == "chat"
    ]
    models = {str(span.attributes["gen_ai.request.model"]) for span in spans}
    return {name.rpartition("-")[0] if name.startswith("whet-") else name for name in models}
