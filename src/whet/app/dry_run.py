"""`whet dev`: an agent on a few tasks without training, and what came of it."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue
from rich.console import Console

from whet.app.console import new_run
from whet.app.dry_run_tree import draw
from whet.app.folder import RunFolder
from whet.app.given import Surroundings, check_given
from whet.app.signals import run_async
from whet.app.tasks import Tasks, load_tasks, training_plan
from whet.app.tried import Tried
from whet.app.wire import NOTHING, open_run
from whet.config import resolve
from whet.errors import ConfigError
from whet.protocols import Store
from whet.runners.agent import Agent, check_agent
from whet.runners.execution import check_runnable
from whet.types import Attempt, Outcome, Rollout

KIND = "dev"


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a dry run came to."""

    run: Path
    tried: tuple[Tried, ...]

    def as_json(self) -> dict[str, object]:
        """All of it."""
        return {"run": str(self.run), "attempts": [tried.as_json() for tried in self.tried]}


def dry_run(
    agent: Agent,
    tasks: Tasks,
    settings: dict[str, JsonValue],
    console: Console,
    *,
    samples: int,
    surroundings: Surroundings = NOTHING,
) -> DryRun:
    """Run the agent on the first tasks, as training would, and show what happened.

    Raises:
        ConfigError: something the caller can mend.
    """
    check_agent(agent)
    if samples < 1:
        raise ConfigError(f"a dry run takes at least one sample; found {samples}")
    chosen = load_tasks(tasks)[:samples]
    check_given(agent, surroundings.resources)
    config = resolve(settings)
    check_runnable(agent, config.runner)
    folder = new_run(config, KIND, console)
    tried = run_async(_run, agent, chosen, folder, surroundings, console)
    for one in tried:
        console.print(draw(one))
    console.print(f"nothing was trained; all of it: {folder.path}", highlight=False)
    return DryRun(folder.path, tuple(tried))


def dry_run_command(
    agent: Agent, tasks: Sequence[JsonValue], values: dict[str, JsonValue], args: argparse.Namespace
) -> int:
    """`whet dev`, and `whet train --debug`."""
    console = Console(quiet=args.quiet, stderr=args.json)
    done = dry_run(agent, tasks, values, console, samples=args.samples)
    if args.json:
        sys.stdout.write(json.dumps(done.as_json()) + "\n")
    return 0


async def _run(
    agent: Agent,
    tasks: Sequence[JsonValue],
    folder: RunFolder,
    surroundings: Surroundings,
    console: Console,
) -> list[Tried]:
    def on_outcome(attempt: Attempt, outcome: Outcome) -> None:
        pass

    def progress(text: str) -> None:
        console.print(text, highlight=False)

    async with open_run(
        agent, folder, surroundings=surroundings, on_outcome=on_outcome, progress=progress
    ) as run:
        rollouts = _rollouts(tasks, folder)
        await run.collector.begin(rollouts)
        await run.collector.wait([rollout.id for rollout in rollouts])
        return [await _read(run.store, rollout) for rollout in rollouts]


def _rollouts(tasks: Sequence[JsonValue], folder: RunFolder) -> list[Rollout]:
    """One of each task, in the order given, each tried once: a failure is what one looks for."""
    config = folder.config()
    [example] = training_plan(tasks[:1], config.model_copy(update={"group_size": 1}))(0)
    return [
        example.model_copy(
            update={
                "id": f"dev-{n:03d}",
                "group": f"dev-{n:03d}",
                "task": task,
                "max_attempts": 1,
            }
        )
        for n, task in enumerate(tasks)
    ]


async def _read(store: Store, rollout: Rollout) -> Tried:
    record = (await store.attempts(rollout.id))[-1]
    learned = await store.trajectories([rollout.id])
    return Tried(
        rollout=rollout,
        record=record,
        calls=tuple(await store.calls(record.id)),
        spans=tuple(await store.spans(record.id)),
        rewards=learned[0].rewards if learned else (),
    )
