"""One agent in a runner process of its own environment; store, gateway and training are here."""

import os
import re
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest
from recipes import ROOT
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whet.algorithms.grpo import GRPO
from whet.app import sampler
from whet.app.local_sampler import local_sampler
from whet.app.tasks import training_plan
from whet.config import RunConfig, resolve
from whet.demos.problems import problems
from whet.gateway import keys
from whet.loop import train
from whet.policies.catalogue import resolve_model
from whet.policies.local import LocalPolicy
from whet.runners.collect import QueueCollector
from whet.runners.preflight import warnings_in
from whet.store.server import StoreServer
from whet.store.sqlite import SQLiteStore
from whet.trainers.local import LocalTrainer
from whet.types import Span, StepRecord, Trajectory

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
    spans: dict[str, list[Span]]
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
    build_app = sampler.build_app
    patch.setattr(
        sampler, "build_app", lambda *given: taps.append(Tap(build_app(*given))) or taps[0]
    )
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
    policy = LocalPolicy(resolve_model(config.model), config.trainer, device="cpu", seed=1)
    secret = keys.secret_of(TOKEN, RUN)
    async with (
        SQLiteStore(folder / "store.db", run=RUN) as store,
        local_sampler(policy, config) as engine,
        sampler.serve(engine, config, store, secret) as gateway,
    ):
        with at_work(runner, store, gateway.url, folder) as work, anyio.fail_after(PATIENCE_S):
            records = train(
                training_plan(_tasks(), config),
                config,
                checkpoints=folder / "checkpoints",
                collector=QueueCollector(queue=store, log=store),
                algorithm=GRPO(config.algorithm),
                trainer=LocalTrainer(policy),
                log=store,
            )
            [step] = [record async for record in records]
        found = await store.trajectories(step.consumed)
        warnings = [*(await warnings_in(store)).values()]
        spans = {each.attempt.id: await store.spans(each.attempt.id) for each in found}
        return Trial(step, found, taps[0].streamed, work.log.read_text(), warnings, spans)


def _tasks() -> list[object]:
    """Every other one asks for streams."""
    drawn = problems("train", TASKS, seed=2)
    return [{**task, "stream": bool(number % 2)} for number, task in enumerate(drawn)]


@contextmanager
def at_work(runner: Runner, store: SQLiteStore, gateway: str, folder: Path) -> Generator[AtWork]:
    """The store served, and the runner joined to it."""
    server = StoreServer(store, token=TOKEN)
    place = ("--store", server.url, "--run", RUN, "--gateway", gateway)
    tracer = ("--tracer", runner.tracer) if runner.tracer else ()
    command = (runner.python, "-m", "whet.app.cli", "runner", runner.agent, *place, *tracer)
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
