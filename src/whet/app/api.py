"""`whet.train` and `whet train`: the one sync door for users."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import cast

from pydantic import JsonValue
from rich.console import Console

from whet.app.addresses import STORE_VARIABLE
from whet.app.algorithm import OwnAlgorithm
from whet.app.algorithm_run import run_algorithm
from whet.app.console import new_run, work
from whet.app.credit import check_named, check_own, name_of
from whet.app.display import stopped
from whet.app.folder import RunFolder
from whet.app.given import Given, Surroundings, as_resources, check_given
from whet.app.loading import load_function
from whet.app.tasks import Tasks, load_tasks
from whet.app.training import Result
from whet.app.training_process import joint_folder, train_joint
from whet.config import merge, resolve
from whet.errors import ConfigError
from whet.protocols import Algorithm
from whet.runners.agent import Agent, check_agent
from whet.runners.execution import check_runnable
from whet.runners.hooks import Hooks


def train(
    agent: Agent,
    tasks: Tasks,
    *,
    held_out: Tasks | None = None,
    algorithm: Algorithm | dict[str, JsonValue] | None = None,
    resources: Given | None = None,
    hooks: Sequence[Hooks] = (),
    tracer: str | None = None,
    resume: bool = False,
    store: str | None = None,
    quiet: bool = False,
    **settings: JsonValue,
) -> Result:
    """Train the model behind an agent on tasks; `settings` are keys of the config.

    With `held_out` tasks the base and the trained model are compared on them. `algorithm` is one
    of your own, or keys of the config like all others. `resources` are given to every rollout, and
    `hooks` called around each attempt. `tracer` keeps the spans that the agent's SDK makes of
    itself, which is `runner.tracer`. `resume` continues the run that `name` names, or the
    newest. With a `store`, or WHET_STORE in the environment, this process only
    trains: `whet serve` and `whet runner` at that store do the rest, and the same call goes on
    with a run that was begun.

    Raises:
        ConfigError: something the caller can mend; nothing was started.
    """
    check_agent(agent)
    train_on = load_tasks(tasks)
    compare_on = load_tasks(held_out) if held_out is not None else []
    console = Console(quiet=quiet)
    surroundings = Surroundings(as_resources(resources), tuple(hooks))
    check_given(agent, surroundings.resources)
    if tracer is not None:
        settings = merge(settings, {"runner": {"tracer": tracer}})
    own = None
    if isinstance(algorithm, dict):
        settings |= {"algorithm": algorithm}
    elif algorithm is not None:
        own = check_own(algorithm)
        settings |= {"algorithm": {"name": name_of(own)}}
    if (address := store or os.environ.get(STORE_VARIABLE)) is not None:
        if hooks:
            raise ConfigError("hooks are called where agents run: give them to `whet runner`")
        if resolve(settings).runner.tracer:
            raise ConfigError("a tracer is where agents run: give it to `whet runner --tracer`")
        return train_joint(
            train_on,
            compare_on,
            joint_folder(settings, console),
            console,
            address=address,
            algorithm=own,
            surroundings=surroundings,
        )
    check_runnable(agent, resolve(settings).runner)
    if own is None:
        check_named(resolve(settings))
    folder = _folder(settings, console, resume=resume)
    return work(agent, train_on, compare_on, folder, console, own, surroundings)


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
    check_named(resolve(values))
    check_runnable(agent, resolve(values).runner)
    check_given(agent, {})
    folder = _folder(values, console, resume=args.resume is not None)
    try:
        result = work(agent, tasks, held_out, folder, console)
    except KeyboardInterrupt:
        given = f" --held-out {args.held_out}" if args.held_out else ""
        return stopped(f"whet train {args.agent or '...'} --tasks {args.tasks}{given}", folder)
    if args.json:
        sys.stdout.write(json.dumps(result.as_json()) + "\n")
    return 0


def train_joint_command(
    tasks: Sequence[JsonValue],
    held_out: Sequence[JsonValue],
    values: dict[str, JsonValue],
    args: argparse.Namespace,
) -> int:
    """`whet train --store`."""
    console = Console(quiet=args.quiet, stderr=args.json)
    folder = joint_folder(values, console)
    try:
        result = train_joint(tasks, held_out, folder, console, address=args.store)
    except KeyboardInterrupt:
        sys.stderr.write("whet: stopped, nothing is lost; the same command goes on\n")
        return 130
    if args.json:
        sys.stdout.write(json.dumps(result.as_json()) + "\n")
    return 0


def algorithm_command(
    tasks: Sequence[JsonValue],
    held_out: Sequence[JsonValue],
    values: dict[str, JsonValue],
    args: argparse.Namespace,
) -> int:
    """`whet train --algorithm`."""
    algorithm = load_function(args.algorithm, "algorithm")
    if not isinstance(algorithm, OwnAlgorithm):
        raise ConfigError(f"{args.algorithm!r} is no algorithm: mark it with @whet.algorithm")
    result = run_algorithm(
        algorithm,
        cast(Agent, load_function(args.agent)) if args.agent and args.store is None else None,
        tasks,
        held_out=held_out,
        resources={},
        store=args.store,
        quiet=args.quiet,
        settings=values,
    )
    if args.json:
        sys.stdout.write(json.dumps(result) + "\n")
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
