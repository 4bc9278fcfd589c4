"""`whet demo`: real RL through the real path, on this machine, in minutes."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import JsonValue
from rich.console import Console

from whet.app.console import new_run, work
from whet.app.display import stopped
from whet.app.folder import RunFolder
from whet.app.training import Result
from whet.config import RunConfig, merge, resolve
from whet.demos import arithmetic, hello, problems
from whet.runners.agent import Agent

TEST_SEED = 1
"""The held-out tasks are the same whatever the run's seed."""


@dataclass(frozen=True, slots=True)
class Demo:
    """An agent, its tasks, and settings that work for it."""

    agent: Agent
    tasks: Callable[[RunConfig], tuple[list[JsonValue], list[JsonValue]]]
    """Training tasks and held-out tasks."""
    settings: dict[str, dict[str, JsonValue]]
    """Config by model name; the first is the default model."""


def _problems(config: RunConfig) -> tuple[list[JsonValue], list[JsonValue]]:
    # A model that never saw a tool is shown one worked example.
    examples = config.model != "tiny"
    train = problems.problems("train", 2000, config.seed, examples=examples)
    return [*train], [*problems.problems("test", 200, TEST_SEED, examples=examples)]


def _identities(config: RunConfig) -> tuple[list[JsonValue], list[JsonValue]]:
    tiny = config.model == "tiny"
    train = hello.identities("train", 512, config.seed, tiny=tiny)
    test = hello.identities("test", 100, TEST_SEED, tiny=tiny)
    return [{**task} for task in train], [{**task} for task in test]


DEMOS = {
    "arithmetic": Demo(
        agent=arithmetic.solve,
        tasks=_problems,
        settings={
            "tiny": {
                "steps": 24,
                "tasks_per_step": 8,
                "group_size": 8,
                "trainer": {"weights": "full", "micro_batch_tokens": 4096},
                "adam": {"lr": 3e-4},
            },
            "smollm2": {
                "steps": 20,
                "tasks_per_step": 4,
                "group_size": 8,
                "trainer": {"weights": "lora"},
                "adam": {"lr": 3e-4},
                "runner": {"temperature": 0.7, "concurrency": 32},
                "evaluation": {"temperature": 0.7},
            },
        },
    ),
    "hello": Demo(
        agent=hello.say_it,
        tasks=_identities,
        settings={
            "smollm2": {
                "steps": 12,
                "tasks_per_step": 4,
                "group_size": 8,
                "trainer": {"weights": "lora"},
                "adam": {"lr": 3e-4},
            },
            "tiny": {"steps": 16, "trainer": {"weights": "lora"}, "adam": {"lr": 5e-4}},
        },
    ),
}


def run_demo(args: argparse.Namespace, flags: dict[str, JsonValue]) -> int:
    """Run a demo, or continue one, and report."""
    demo = DEMOS[args.demo]
    # With --json, stdout is for the one line; everything for people goes to stderr.
    console = Console(quiet=args.quiet, stderr=args.json)
    folder = _folder(args, demo, flags, console)
    try:
        config = folder.config()
        tasks, held_out = demo.tasks(config)
        console.print(
            f"[bold]whet demo {args.demo}[/]: {config.model} on this machine, {folder.path}",
            soft_wrap=True,
        )
        result = work(demo.agent, tasks, held_out, folder, console)
        _print_next(console, result, args.demo)
    except KeyboardInterrupt:
        return stopped(f"whet demo {args.demo}", folder)
    if args.json:
        sys.stdout.write(json.dumps(result.as_json()) + "\n")
    return 0


def _folder(
    args: argparse.Namespace, demo: Demo, flags: dict[str, JsonValue], console: Console
) -> RunFolder:
    kind = f"demo-{args.demo}"
    if args.resume is not None:
        directory = resolve(flags).dir
        named = directory / "runs" / args.resume
        folder = RunFolder(named) if args.resume else RunFolder.latest(directory, kind)
        folder.resume(flags)
        return folder
    model = str(flags.get("model", next(iter(demo.settings))))
    settings = demo.settings.get(model, demo.settings["smollm2"])
    config = resolve(merge({"model": model} | settings, flags))
    return new_run(config, kind, console)


def _print_next(console: Console, result: Result, name: str) -> None:
    other = "hello" if name == "arithmetic" else "arithmetic"
    for line in (
        f"took {result.seconds:.0f} s; the run lives in {result.run}",
        f"picture: {result.run / 'curve.png'}   model: {result.run / 'model'}",
        f"next: whet demo {other}, or your own: whet train my_agent.py:solve --tasks x.jsonl",
    ):
        console.print(line, soft_wrap=True)
