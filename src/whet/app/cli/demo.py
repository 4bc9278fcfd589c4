"""`whet demo`: train a small model with RL on this machine, in minutes."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from pydantic import JsonValue
from rich.console import Console

from whet.app.cli.config_flags import TRAINING_KEYS, add_config_flags, read_config_values
from whet.app.cli.display import open_console
from whet.app.cli.flags import (
    CommandParser,
    add_output_flags,
    add_resume_flag,
    name_resumed_run,
)
from whet.app.run_folder import RunFolder
from whet.config import RunConfig, list_leaves, merge, resolve
from whet.demos import problems
from whet.errors import requires_extra
from whet.runners.agent import Agent
from whet.runners.loading import load_function

if TYPE_CHECKING:  # imports torch
    from whet.app.experiment import Result

TEST_SEED = 1
"""The held-out tasks are the same for every seed of the run."""


@dataclass(frozen=True, slots=True)
class Demo:
    """An agent, its tasks, and settings that work for it."""

    agent: str
    """As `module:function`: its module imports `openai`."""
    tasks: Callable[[RunConfig], tuple[list[JsonValue], list[JsonValue]]]
    """Training tasks and held-out tasks."""
    settings: dict[str, dict[str, JsonValue]]
    """Config by model name; the first is the default model."""


def _make_problems(config: RunConfig) -> tuple[list[JsonValue], list[JsonValue]]:
    # A model that never saw a tool is shown one worked example.
    examples = config.model != "tiny"
    train = problems.problems("train", 2000, config.seed, examples=examples)
    return [*train], [*problems.problems("test", 200, TEST_SEED, examples=examples)]


def _make_identities(config: RunConfig) -> tuple[list[JsonValue], list[JsonValue]]:
    from whet.demos.hello import identities  # noqa: PLC0415 - imports openai

    tiny = config.model == "tiny"
    train = identities("train", 512, config.seed, tiny=tiny)
    test = identities("test", 100, TEST_SEED, tiny=tiny)
    return [{**task} for task in train], [{**task} for task in test]


DEMOS = {
    "arithmetic": Demo(
        agent="whet.demos.arithmetic:solve",
        tasks=_make_problems,
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
        agent="whet.demos.hello:say_it",
        tasks=_make_identities,
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


def add_arguments(parser: CommandParser) -> None:
    """Add the flags of `whet demo`."""
    parser.usage = "whet demo [arithmetic|hello] [options]"
    parser.group("demo").add_argument(
        "demo",
        nargs="?",
        choices=list(DEMOS),
        default="arithmetic",
        metavar="DEMO",
        help="arithmetic: word problems with a calculator (default); hello: repeat an identity",
    )
    for title in TRAINING_KEYS:
        parser.group(title)
    add_resume_flag(parser, "a run")
    add_output_flags(parser)
    add_config_flags(parser, TRAINING_KEYS, file=False, defaults=_describe_defaults())
    parser.add_examples(
        "whet demo",
        "whet demo hello --steps 4",
    )
    parser.set_defaults(run=run_demo)


def _describe_defaults() -> dict[str, str]:
    """The demos' own config values by key, such as `arithmetic 24, with smollm2 20; hello 12`."""
    models = {name: {"": next(iter(demo.settings))} for name, demo in DEMOS.items()}
    described = {"model": _join_defaults(models)}
    every = [settings for demo in DEMOS.values() for settings in demo.settings.values()]
    for key in {key for settings in every for key, _ in list_leaves(settings)}:
        described[key] = _join_defaults(
            {
                name: {model: _read_value(own, key) for model, own in demo.settings.items()}
                for name, demo in DEMOS.items()
            }
        )
    return described


def _read_value(settings: Mapping[str, JsonValue], key: str) -> str:
    value = dict(list_leaves(resolve(settings).model_dump(mode="json")))[key]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _join_defaults(values: Mapping[str, Mapping[str, str]]) -> str:
    """Values by demo and model in one line; one that all have stands alone."""
    parts: list[str] = []
    for name, by_model in values.items():
        first = next(iter(by_model.values()))
        parts.append(f"{name} {first}")
        parts[-1] += "".join(f", with {m} {v}" for m, v in by_model.items() if v != first)
    if len({value for by_model in values.values() for value in by_model.values()}) == 1:
        return parts[0].removeprefix(f"{next(iter(values))} ")
    return "; ".join(parts)


def run_demo(args: argparse.Namespace) -> int:
    """Run a demo, or resume one, and report the result."""
    flags = read_config_values(args)
    resolve(flags)  # errors in flags are reported before the slow imports
    with requires_extra("`whet demo`", "local"):
        from whet.app.cli.display import (  # noqa: PLC0415 - imports torch
            format_resume,
            report_stopped,
        )
        from whet.app.train import check_trained, run_and_report  # noqa: PLC0415
    demo = DEMOS[args.demo]
    # With --json, stdout has the one line of JSON alone.
    console = open_console(quiet=args.quiet, stderr=args.json)
    folder = _open_folder(args, demo, flags, console)
    try:
        config = folder.read_config()
        tasks, held_out = demo.tasks(config)
        result = run_and_report(_load_agent(demo), tasks, held_out, folder, console)
        if result.problem is None:
            _print_next(console, result, args.demo)
    except KeyboardInterrupt:
        return report_stopped(f"whet demo {args.demo}", folder)
    if args.json:
        sys.stdout.write(json.dumps(result.as_json()) + "\n")
    check_trained(result, format_resume(f"whet demo {args.demo}", folder))
    return 0


def _open_folder(
    args: argparse.Namespace, demo: Demo, flags: dict[str, JsonValue], console: Console
) -> RunFolder:
    from whet.app.train import prepare_run  # noqa: PLC0415 - imports torch

    kind = f"demo-{args.demo}"
    if args.resume is not None:
        values = name_resumed_run(args, flags)
        return prepare_run(_load_agent(demo), values, kind, console, resume=True)
    model = str(flags.get("model", next(iter(demo.settings))))
    settings = demo.settings.get(model, demo.settings["smollm2"])
    values = merge({"model": model} | settings, flags)
    return prepare_run(_load_agent(demo), values, kind, console)


def _load_agent(demo: Demo) -> Agent:
    return cast(Agent, load_function(demo.agent))


def _print_next(console: Console, result: "Result", name: str) -> None:
    other = "hello" if name == "arithmetic" else "arithmetic"
    next_ = f"whet demo {other}, or your own: whet train my_agent.py:solve --tasks x.jsonl"
    console.print(f"took {result.seconds:.0f} s; then: {next_}", soft_wrap=True)
