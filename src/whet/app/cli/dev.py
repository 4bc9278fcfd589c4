"""`whet dev`: run an agent on a few tasks without training, and show what was recorded."""

import argparse
import json
import sys

from pydantic import JsonValue
from rich.console import Console

from whet.app.cli.config_flags import add_config_flags, read_config_values
from whet.app.cli.display import open_console
from whet.app.cli.flags import (
    DEV_TASKS,
    CommandParser,
    add_agent_flags,
    add_output_flags,
    add_samples_flag,
    add_tasks_flags,
    format_command,
    load_agent,
    load_named_tasks,
)
from whet.config import resolve
from whet.errors import requires_extra

SHOWN = {
    "model": ("model", "engine.kind"),
    "running agents": ("runner.timeout_s", "runner.temperature"),
    "output": ("dir",),
}


def add_arguments(parser: CommandParser) -> None:
    """Add the flags of `whet dev`."""
    parser.usage = "whet dev AGENT --tasks FILE [options] [-- COMMAND]"
    add_agent_flags(parser)
    add_tasks_flags(parser, held_out=False)
    add_samples_flag(parser)
    add_config_flags(parser, SHOWN)
    add_output_flags(parser)
    parser.add_examples(
        "whet dev agent.py:answer --tasks tasks.jsonl --samples 1",
    )
    parser.set_defaults(run=run_dev)


def run_dev(args: argparse.Namespace) -> int:
    """Run `whet dev`, or `whet train --debug`."""
    values = read_config_values(args)
    resolve(values)
    agent = load_agent(args)
    tasks = load_named_tasks(args, agent)
    with requires_extra("`whet dev`", "local"):
        from whet.app.inspection.dev_run import dev_run  # noqa: PLC0415 - imports torch
    console = open_console(quiet=args.quiet, stderr=args.json)
    samples = DEV_TASKS if args.samples is None else args.samples
    result = dev_run(agent, tasks, values, console, samples=samples)
    if args.json:
        sys.stdout.write(json.dumps(result.as_json()) + "\n")
    else:
        _print_next(console, args, values, can_train=result.problem is None)
    if result.problem:
        sys.stderr.write(f"whet: {result.problem}\n")
        return 1
    return 0


def _print_next(
    console: Console, args: argparse.Namespace, values: dict[str, JsonValue], *, can_train: bool
) -> None:
    flags = ("tasks", "prompt", "judge")
    model = ["--model", str(values["model"])] if "model" in values else []
    train, again = (format_command(name, args, flags, model) for name in ("train", "dev"))
    advice = f"`{train}`" if can_train else f"fix the agent, then `{again}`"
    console.print(f"next: {advice}", highlight=False, soft_wrap=True)
