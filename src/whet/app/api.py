"""`whet.train` and `whet train`: the one sync door for users."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import anyio
from pydantic import JsonValue
from rich.console import Console

from whet.app.display import ConsoleDisplay
from whet.app.folder import RunFolder
from whet.app.report import draw_picture, print_report
from whet.app.tasks import load_tasks
from whet.app.training import Result, run_training
from whet.config import RunConfig, resolve
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
    the run that `name` names.

    Raises:
        ConfigError: something the caller can mend; nothing was started.
    """
    check_agent(agent)
    config = resolve(settings)
    train_on = load_tasks(tasks)
    compare_on = load_tasks(held_out) if held_out is not None else []
    folder = _folder(config, resume=resume)
    console = Console(quiet=quiet)
    with ConsoleDisplay(console) as display:
        result = anyio.run(run_training, agent, train_on, compare_on, folder, display)
    draw_picture(result, folder.picture)
    print_report(console, result)
    return result


def train_command(agent: object, values: dict[str, JsonValue], args: argparse.Namespace) -> int:
    """`whet train`."""
    check_agent(agent)
    if args.resume:
        values = values | {"name": args.resume}
    result = train(
        cast(Agent, agent),
        args.tasks,
        held_out=args.held_out,
        resume=args.resume is not None,
        quiet=args.quiet or args.json,
        **values,
    )
    if args.json:
        sys.stdout.write(json.dumps(result.as_json()) + "\n")
    return 0


def _folder(config: RunConfig, *, resume: bool) -> RunFolder:
    if not resume:
        return RunFolder.create(config, "train")
    if config.name is None:
        return RunFolder.latest(config.dir, "train")
    return RunFolder(config.dir / "runs" / config.name)
