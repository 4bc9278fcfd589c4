"""A few games through the whole path: gateway, store, and a runner in the other environment."""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import anyio
from game import tasks

from whet.app.local_models import serve_model
from whet.app.sources import read_models
from whet.config import RunConfig
from whet.gateway import keys
from whet.store.server import StoreServer
from whet.store.sqlite import SQLiteStore
from whet.types import Rollout, Trajectory

RUN, TOKEN = "dry", "of the dry run"
GAMES = 4


def main(args: argparse.Namespace) -> int:
    """Play, and show what was said, what it earned, and what would have been trained."""
    return anyio.run(dry_run, args.model, args.runner_python, args.turns)


async def dry_run(model: str, runner_python: str, turns: int) -> int:
    config = RunConfig()
    [player] = read_models([f"player={model}"], None, print)
    rollouts = [
        Rollout(id=f"game-{number}", group=f"game-{number}", task=task)
        for number, task in enumerate(tasks("test", turns)[:GAMES])
    ]
    ids = [rollout.id for rollout in rollouts]
    with tempfile.TemporaryDirectory() as folder:
        async with (
            SQLiteStore(Path(folder) / "store.db", run=RUN) as store,
            serve_model(player, config, store, keys.secret_of(TOKEN, RUN), Path(folder)) as gateway,
        ):
            await store.enqueue(rollouts)
            with at_work(runner_python, store, gateway.url):
                await store.wait(ids)
            played = await store.trajectories(ids)
    for trajectory in played:
        show(trajectory)
    print(f"{len(played)} of {len(ids)} games reached their end")
    return int(len(played) < len(ids))


@contextmanager
def at_work(python: str, store: SQLiteStore, gateway: str) -> Generator[None]:
    server = StoreServer(store, token=TOKEN)
    agent = f"{Path(__file__).with_name('agent.py')}:guess"
    place = ("--store", server.url, "--run", RUN, "--gateway", gateway)
    process = subprocess.Popen(
        [python, "-m", "whet.app.cli", "runner", agent, *place],
        env={**os.environ, "WHET_STORE_TOKEN": TOKEN},
        stdout=sys.stderr,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)
        server.close()


def show(trajectory: Trajectory) -> None:
    sampled = [generation for call in trajectory.calls for generation in call.generations]
    lines = [str(generation.message.get("content")) for generation in sampled]
    print(f"{trajectory.attempt.rollout.task}: reward {trajectory.reward:.2f}")
    print(f"  {' / '.join(lines)}")
    print(f"  {len(sampled)} calls, {sum(len(g.tokens) for g in sampled)} sampled tokens recorded")
