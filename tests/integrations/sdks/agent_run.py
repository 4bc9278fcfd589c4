"""One agent in a runner process of its own environment; store, gateway and training are here."""

import os
import re
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
from pydantic import JsonValue
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from integrations.sdks.recipes import ROOT
from whet.algorithms.grpo import GRPO
from whet.app.composition import gateway_server
from whet.app.composition.samplers import open_local_sampler
from whet.app.inputs import plan_rollouts
from whet.config import LocalTrainerConfig, RunConfig, resolve
from whet.demos.problems import problems
from whet.gateway import auth
from whet.models.catalog import resolve_model
from whet.models.huggingface import LocalPolicy
from whet.runners.collector import QueueCollector
from whet.runners.diagnostics import read_warnings
from whet.store.http.server import StoreServer
from whet.store.sqlite import SQLiteStore
from whet.trainers.local import LocalTrainer
from whet.training.loop import train
from whet.types import AttemptId, Span, StepRecord, Trajectory

TOKEN, RUN = "of the suite", "sdk"
TASKS, GROUP = 4, 6
PATIENCE_S = 240
ATTEMPT = re.compile(r"/attempt/([^/]+)/")


class Runner(NamedTuple):
    """A runner process to start: its Python, agent and environment."""

    python: Path
    agent: str
    """`file.py:function`"""
    environment: dict[str, str]
    concurrency: int = 6
    tracer: str | None = None


class StartedRunner(NamedTuple):
    """A runner process with the store that it reads."""

    store: str
    """The URL of the store."""
    log: Path
    """The runner's output."""


@dataclass
class AgentRun:
    """The results of a training step with an agent."""

    step: StepRecord
    trajectories: list[Trajectory]
    streamed: set[str]
    """Attempts that were answered by a stream, once at least."""
    log: str
    """The runner's output."""
    warnings: list[str]
    """Kept in the store."""
    spans: dict[AttemptId, list[Span]]
    """By attempt."""


@dataclass
class StreamRecorder:
    """Middleware that notes which attempts the gateway answers by a stream."""

    app: ASGIApp
    streamed: set[str] = field(default_factory=set[str])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_noted(message: Message) -> None:
            for name, value in message.get("headers", ()):
                if name == b"content-type" and value.startswith(b"text/event-stream"):
                    self.streamed.update(ATTEMPT.findall(scope["path"]))
            await send(message)

        await self.app(scope, receive, send_noted)


def run_agent(runner: Runner, folder: Path, patch: pytest.MonkeyPatch) -> AgentRun:
    """Train for one step with an agent that another process runs."""
    recorders: list[StreamRecorder] = []
    build_app = gateway_server.build_app

    def build_recorded(*args: Any, **kwargs: Any) -> StreamRecorder:
        recorders.append(StreamRecorder(build_app(*args, **kwargs)))
        return recorders[0]

    patch.setattr(gateway_server, "build_app", build_recorded)
    config = resolve(
        {
            "steps": 1,
            "tasks_per_step": TASKS,
            "group_size": GROUP,
            "seed": 5,
            "trainer": {"weights": "full"},
            "runner": {"timeout_s": 60, "max_attempts": 1},
        }
    )
    return anyio.run(_run_agent, config, runner, folder, recorders)


async def _run_agent(
    config: RunConfig, runner: Runner, folder: Path, recorders: list[StreamRecorder]
) -> AgentRun:
    assert isinstance(config.trainer, LocalTrainerConfig)
    policy = LocalPolicy(resolve_model(config.model), config.trainer, device="cpu", seed=1)
    secret = auth.derive_secret(TOKEN, RUN)
    async with (
        SQLiteStore(folder / "store.db", run=RUN) as store,
        open_local_sampler(policy, config) as engine,
        gateway_server.serve_gateway({"": engine}, config, store, secret) as gateway,
    ):
        with (
            start_runner(runner, store, gateway.url, folder) as started,
            anyio.fail_after(PATIENCE_S),
        ):
            records = train(
                plan_rollouts(_tasks(), config),
                config,
                checkpoints=folder / "checkpoints",
                collector=QueueCollector(queue=store, log=store),
                algorithm=GRPO(config.algorithm),
                trainer=LocalTrainer(policy),
                log=store,
            )
            [step] = [record async for record in records]
        found = await store.trajectories(step.consumed)
        warnings = [*(await read_warnings(store)).values()]
        spans = {each.attempt.id: await store.spans(each.attempt.id) for each in found}
        return AgentRun(
            step, found, recorders[0].streamed, started.log.read_text(), warnings, spans
        )


def _tasks() -> list[JsonValue]:
    """Tasks, every other one with a streaming agent."""
    drawn = problems("train", TASKS, seed=2)
    return [{**task, "stream": bool(number % 2)} for number, task in enumerate(drawn)]


@contextmanager
def start_runner(
    runner: Runner, store: SQLiteStore, gateway: str, folder: Path
) -> Generator[StartedRunner]:
    """Serve the store, and start a runner that reads it."""
    server = StoreServer(store, token=TOKEN)
    place = ("--store", server.url, "--run", RUN, "--gateway", gateway)
    tracer = ("--tracer", runner.tracer) if runner.tracer else ()
    command = (runner.python, "-m", "whet", "runner", runner.agent, *place, *tracer)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "WHET_STORE_TOKEN": TOKEN}
    log = folder / "runner.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            (*command, "--concurrency", str(runner.concurrency)),
            cwd=folder,
            env=environment | runner.environment,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            yield StartedRunner(server.url, log)
        finally:
            process.terminate()
            process.wait(60)
            server.close()
