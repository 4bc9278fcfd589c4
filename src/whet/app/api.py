"""`whet.train` and `whet train`: the one sync door for users."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import JsonValue
from rich.console import Console

from whet.app.console import new_run, work
from whet.app.display import stopped
from whet.app.folder import RunFolder
from whet.app.tasks import load_tasks
from whet.app.training import Result
from whet.config import resolve
from whet.runners.agent import Agent, check_agent

Tasks = str | Path | Sequence[JsonValue]


def train(
    agent: Agent,
    tasks: Tasks,
    *,
    held_out: Tasks | None = None,
    resume: bool = False,
    quiet: bool = False,
    **settings: JsonValue,
) -> Result:
    """Train the model behind an agent on tasks; `settings` are keys of the config.

    With `held_out` tasks the base and the trained model are compared on them. `resume` continues
    the run that `name` names, or the newest.

    Raises:
        ConfigError: something the caller can mend; nothing was started.
    """
    check_agent(agent)
    train_on = load_tasks(tasks)
    compare_on = load_tasks(held_out) if held_out is not None else []
    console = Console(quiet=quiet)
    folder = _folder(settings, console, resume=resume)
    return work(agent, train_on, compare_on, folder, console)


def train_command(
    agent: Agent,
    tasks: Sequence[JsonValue],
    held_out: Sequence[JsonValue],
    values: dict[str, JsonValue],
    args: argparse.Namespace,
) -> int:
    """`whet train`."""
    if args.resume:
        values = values | {"name": args.resume}
    console = Console(quiet=args.quiet, stderr=args.json)
    folder = _folder(values, console, resume=args.resume is not None)
    try:
        result = work(agent, tasks, held_out, folder, console)
    except KeyboardInterrupt:
        given = f" --held-out {args.held_out}" if args.held_out else ""
        return stopped(f"whet train {args.agent} --tasks {args.tasks}{given}", folder)
    if args.json:
        sys.stdout.write(json.dumps(result.as_json()) + "\n")
    return 0


def _folder(values: dict[str, JsonValue], console: Console, *, resume: bool) -> RunFolder:
    config = resolve(values)
    if not resume:
        return new_run(config, "train", console)
    if config.name is None:
        folder = RunFolder.latest(config.dir, "train")
    else:
        folder = RunFolder(config.dir / "runs" / config.name)
    folder.resume(values)
    return folder
