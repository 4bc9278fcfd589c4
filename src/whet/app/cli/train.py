"""`whet train`: train the model behind an agent."""

import argparse
import json
import os
import sys
from typing import Any, cast

from pydantic import JsonValue
from rich.console import Console

from whet.app.cli.config_flags import TRAINING_KEYS, add_config_flags, read_config_values
from whet.app.cli.dev import run_dev
from whet.app.cli.display import format_resume, open_console, report_stopped
from whet.app.cli.flags import (
    CommandParser,
    add_agent_flags,
    add_output_flags,
    add_prompt_flag,
    add_resume_flag,
    add_samples_flag,
    add_tasks_flags,
    format_command,
    has_agent,
    load_agent,
    load_named_held_out,
    load_named_tasks,
    name_resumed_run,
)
from whet.app.composition.distributed import STORE_VARIABLE
from whet.app.composition.driver import Driver
from whet.app.inputs import AgentInputs, check_held_out
from whet.app.prompts.saved import load_prompts
from whet.app.run_folder import RunFolder
from whet.config import VerlConfig, resolve
from whet.errors import ConfigError, DriverFailed, requires_extra
from whet.io.process import follow_supervisor
from whet.runners.agent import Agent
from whet.runners.judges.judge import Judge
from whet.runners.loading import load_function
from whet.trainers.verl.settings import check_contradictions, parse_overrides

Config = dict[str, JsonValue]


def add_arguments(parser: CommandParser) -> None:
    """Add the flags of `whet train`."""
    parser.usage = "whet train AGENT --tasks FILE [options] [-- COMMAND or server flags]"
    add_agent_flags(parser)
    add_tasks_flags(parser, held_out=True)
    add_prompt_flag(parser)
    parser.group("agent and tasks").add_argument(
        "--debug", action="store_true", help="do not train: run a few tasks, as `whet dev` does"
    )
    add_samples_flag(parser, "with --debug: ")
    for title in TRAINING_KEYS:
        parser.group(title)
    parser.group("training").add_argument(
        "--algorithm",
        metavar="FUNCTION",
        help="@whet.algorithm to run instead of the training loop",
    )
    parser.group("training").add_argument(
        "--judge",
        metavar="JUDGE",
        help="whet.judge that ranks a group, as file.py:name",
    )
    add_resume_flag(parser, "a run")
    add_output_flags(parser)
    parser.group("running agents").add_argument(
        "--store",
        default=os.environ.get(STORE_VARIABLE),
        metavar="URL",
        help=f"the store of serve and runner (default ${STORE_VARIABLE})",
    )
    add_config_flags(parser, TRAINING_KEYS)
    parser.add_examples(
        "whet train agent.py:answer --tasks tasks.jsonl --held-out held_out.jsonl",
        "whet train --tasks tasks.jsonl --reward exit -- node agent.js",
    )
    parser.set_defaults(run=run_train)


def run_train(args: argparse.Namespace) -> int:
    """Run `whet train`."""
    values = read_config_values(args)
    config = resolve(values)  # errors in flags are reported before the slow imports
    if args.samples is not None and not args.debug:
        raise ConfigError("--samples is for a dev run: add --debug, or leave it out")
    if args.resume is not None and not args.tasks and not args.env:
        raise ConfigError(
            "--resume needs the agent and the tasks of the run: name both again, as in "
            f"{' '.join(['whet train AGENT --tasks FILE --resume', args.resume]).strip()}"
        )
    environment = load_agent(args) if args.env else None
    tasks = load_named_tasks(args, environment)
    held_out = load_named_held_out(args, environment)
    check_held_out(config, held_out)
    if args.debug:
        return run_dev(args)
    if args.algorithm is not None:
        return _run_driver(args, values, tasks, held_out)
    if args.store is None and not has_agent(args):
        raise ConfigError("found no agent: name one, or use --store and run it with `whet runner`")
    return _train(args, values, tasks, held_out)


def _train(
    args: argparse.Namespace, values: Config, tasks: list[JsonValue], held_out: list[JsonValue]
) -> int:
    if args.store is not None:
        if args.resume is not None:
            raise ConfigError("with --store the same command resumes by itself: leave out --resume")
        follow_supervisor()
    values = name_resumed_run(args, values)
    trainer = resolve(values).trainer
    if isinstance(trainer, VerlConfig):
        check_contradictions(parse_overrides(trainer.overrides))
        if args.prompt or args.judge:
            raise ConfigError(
                "verl does not support prompts or a judge: leave out --prompt and --judge"
            )
    # With a store the agent runs elsewhere, unless this process starts its runners on Ray.
    needs_agent = args.store is None or resolve(values).runner.ray is not None
    agent = load_agent(args) if needs_agent else None
    with requires_extra("`whet train`", "local"):
        from whet.app.train import (  # noqa: PLC0415 - torch
            KIND,
            check_trained,
            prepare_run,
            run_and_report,
        )
    console = open_console(quiet=args.quiet, stderr=args.json)
    resume = args.resume is not None
    prompts = load_prompts(args.prompt) if args.prompt else {}
    judge = _load_judge(args.judge) if args.judge else None
    agent_inputs = AgentInputs(prompts, judge=judge)
    folder = prepare_run(
        agent,
        values,
        KIND,
        console,
        agent_inputs=agent_inputs,
        store=args.store,
        resume=resume,
        inputs=(tasks, held_out),
    )
    if isinstance(trainer, VerlConfig):
        return _train_with_verl(args, agent, tasks, held_out, folder, console)
    try:
        result = run_and_report(
            agent, tasks, held_out, folder, console, agent_inputs=agent_inputs, store=args.store
        )
    except KeyboardInterrupt:
        return _report_stopped(args, folder)
    _print_json(args, result.as_json())
    done = len(result.steps)
    steps = done + 1 if done >= folder.read_config().steps else None  # a run that has all its steps
    if args.store is not None:
        more = "" if steps is None else f" with --steps {steps}"
        check_trained(result, f"run the same command{more}")
    else:
        check_trained(result, format_resume(_format_command(args), folder, steps=steps))
    return 0


def _train_with_verl(
    args: argparse.Namespace,
    agent: Agent | None,
    tasks: list[JsonValue],
    held_out: list[JsonValue],
    folder: RunFolder,
    console: Console,
) -> int:
    from whet.app.verl.train import train_with_verl  # noqa: PLC0415 - only if needed

    try:
        done = train_with_verl(agent, tasks, held_out, folder, console, store=args.store)
    except KeyboardInterrupt:
        return _report_stopped(args, folder)
    console.print(f"checkpoints of verl: {done['checkpoints']}", highlight=False)
    _print_json(args, done)
    return 0


def _load_judge(spec: str) -> Judge:
    found = load_function(spec, "judge")
    if not isinstance(found, Judge):
        raise ConfigError(f"{spec!r} is not a judge: make it with whet.judge(...)")
    return found


def _report_stopped(args: argparse.Namespace, folder: RunFolder) -> int:
    if args.store is not None:
        sys.stderr.write("whet: stopped; the same command resumes the run\n")
        return 130
    return report_stopped(_format_command(args), folder)


def _format_command(args: argparse.Namespace) -> str:
    """The command line, without settings: a run keeps those in its config."""
    return format_command("train", args, ("tasks", "held_out", "prompt", "judge"))


def _run_driver(
    args: argparse.Namespace, values: Config, tasks: list[JsonValue], held_out: list[JsonValue]
) -> int:
    if ":" not in args.algorithm:
        problem = f"found --algorithm {args.algorithm}, expected file.py:function"
        if args.algorithm.endswith(".py"):
            raise ConfigError(problem)
        raise ConfigError(
            f"{problem}: built-in ones are chosen with --algorithm.name {args.algorithm}"
        )
    if args.judge or args.resume is not None:
        raise ConfigError(
            "--algorithm takes no --judge and no --resume: leave them out; the same command "
            "continues the run that --name names"
        )
    driver = load_function(args.algorithm, "algorithm")
    if not isinstance(driver, Driver):
        raise ConfigError(f"{args.algorithm!r} is not an algorithm: mark it with @whet.algorithm")
    agent = load_agent(args) if args.store is None and has_agent(args) else None
    settings = cast(dict[str, Any], values)  # checked by the config
    try:
        result = driver.run(
            agent,
            tasks,
            held_out=held_out,
            resources=load_prompts(args.prompt) if args.prompt else None,
            store=args.store,
            quiet=args.quiet,
            **settings,
        )
    except DriverFailed as failed:
        sys.stderr.write(failed.traceback)
        raise
    _print_json(args, result)
    return 0


def _print_json(args: argparse.Namespace, result: object) -> None:
    if args.json:
        sys.stdout.write(json.dumps(result) + "\n")
