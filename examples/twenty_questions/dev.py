"""A few games without training: store, gateway, and a runner in the other environment."""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from game import tasks

import whet

RUN = "dev"
GAMES = 4


def main(args: argparse.Namespace) -> int:
    """Play, and show the player's lines, their rewards and what would be trained."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        store = f"http://127.0.0.1:{port}"
        place = ("--store", store, "--run", RUN, "--dir", folder)
        agent = f"{Path(__file__).with_name('agent.py')}:guess"
        stack.enter_context(started("store", "--port", str(port), "--dir", folder))
        stack.enter_context(started("serve", *place))
        stack.enter_context(started("runner", agent, *place, python=args.runner_python))
        games = tasks("test", args.turns)[:GAMES]
        played = play.run(
            tasks=games, store=store, name=RUN, dir=folder, model=args.model, quiet=True
        )
    for trajectory in played:
        show(trajectory)
    print(f"{len(played)} of {len(games)} games reached their end")
    return int(len(played) < len(games))


@whet.algorithm
async def play(store, tasks) -> list[whet.Trajectory]:
    """Play every task once; whet starts the function beside the other processes."""
    rollouts = [
        whet.Rollout(id=f"game-{number}", group=f"game-{number}", task=task)
        for number, task in enumerate(tasks)
    ]
    ids = [rollout.id for rollout in rollouts]
    await store.enqueue(rollouts)
    await store.wait(ids)
    return await store.trajectories(ids)


@contextmanager
def started(*arguments: str, python: str = sys.executable) -> Generator[None]:
    """A process of `whet` that is stopped at the end of the block."""
    process = subprocess.Popen(
        [python, "-m", "whet", *arguments], env=os.environ, stdout=sys.stderr
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def show(trajectory: whet.Trajectory) -> None:
    sampled = [generation for call in trajectory.calls for generation in call.generations]
    lines = [str(generation.message.get("content")) for generation in sampled]
    print(f"{trajectory.attempt.rollout.task}: reward {trajectory.reward:.2f}")
    print(f"  {' / '.join(lines)}")
    print(f"  {len(sampled)} calls, {sum(len(g.tokens) for g in sampled)} sampled tokens recorded")
