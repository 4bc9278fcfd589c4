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

from sdks.recipes import ROOT
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
    """Who runs which agent."""

    python: Path
    agent: str
    """`file.py:function`"""
    environment: dict[str, str]
    concurrency: int = 6
    tracer: str | None = None


class AtWork(NamedTuple):
    """A runner that has joined a store."""

    store: str
    """Where that is served."""
    log: Path
    """What the runner says."""


@dataclass
class Trial:
    """What came of a training step with an agent."""

    step: StepRecord
    trajectories: list[Trajectory]
    streamed: set[str]
    """Attempts that were answered by a stream, once at least."""
    said: str
    """By the runner."""
    warnings: list[str]
    """Kept in the store."""
    spans: dict[AttemptId, list[Span]]
    """By attempt."""


@dataclass
class Tap:
    """Notes which attempts are answered by a stream, on the way out of the gateway."""

    app: ASGIApp
    streamed: set[str] = field(default_factory=set[str])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noting(message: Message) -> None:
            for name, value in message.get("headers", ()):
                if name == b"content-type" and value.startswith(b"text/event-stream"):
                    self.streamed.update(ATTEMPT.findall(scope["path"]))
            await send(message)

        await self.app(scope, receive, noting)


def try_out(runner: Runner, folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Train for one step with an agent that another process runs."""
    taps: list[Tap] = []
    build_app = gateway_server.build_app

    def tapped(*given: Any, **named: Any) -> Tap:
        taps.append(Tap(build_app(*given, **named)))
        return taps[0]

    patch.setattr(gateway_server, "build_app", tapped)
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
    return anyio.run(_try_out, config, runner, folder, taps)


async def _try_out(config: RunConfig, runner: Runner, folder: Path, taps: list[Tap]) -> Trial:
    assert isinstance(config.trainer, LocalTrainerConfig)
    policy = LocalPolicy(resolve_model(config.model), config.trainer, device="cpu", seed=1)
    secret = auth.derive_secret(TOKEN, RUN)
    async with (
        SQLiteStore(folder / "store.db", run=RUN) as store,
        open_local_sampler(policy, config) as engine,
        gateway_server.serve_gateway({"": engine}, config, store, secret) as gateway,
    ):
        with at_work(runner, store, gateway.url, folder) as work, anyio.fail_after(PATIENCE_S):
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
        return Trial(step, found, taps[0].streamed, work.log.read_text(), warnings, spans)


def _tasks() -> list[JsonValue]:
    """Every other one asks for streams."""
    drawn = problems("train", TASKS, seed=2)
    return [{**task, "stream": bool(number % 2)} for number, task in enumerate(drawn)]


@contextmanager
def at_work(runner: Runner, store: SQLiteStore, gateway: str, folder: Path) -> Generator[AtWork]:
    """The store served, and the runner joined to it."""
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
            yield AtWork(server.url, log)
        finally:
            process.terminate()
            process.wait(60)
            server.close()
