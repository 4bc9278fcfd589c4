"""`whet eval`: compare models on the tasks of an agent."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from whet.app.cli.config_flags import add_config_flags, read_config_values
from whet.app.cli.display import format_resume, open_console, report_stopped
from whet.app.cli.flags import (
    CommandParser,
    add_agent_flags,
    add_output_flags,
    add_resume_flag,
    add_tasks_flags,
    format_command,
    load_agent,
    load_named_tasks,
    name_resumed_run,
)
from whet.app.prompts.saved import read_prompts
from whet.app.run_folder import RunFolder
from whet.config import resolve
from whet.errors import requires_extra

if TYPE_CHECKING:  # imports numpy and starlette
    from whet.app.evaluation.evaluate import Evaluation

SHOWN = {
    "models": ("engine.kind", "engine.device"),
    "evaluation": (
        *("evaluation.greedy", "evaluation.samples", "evaluation.temperature"),
        *("evaluation.pass_threshold", "runner.concurrency", "runner.timeout_s"),
    ),
    "output": ("name", "dir"),
}
KEPT = ("tasks", "results", "key_variable")
"""Flags of a command that continues an evaluation: the rest is in its folder."""
SECTIONS = ("dir", "name", "engine", "gateway", "trainer.precision", "runner", "evaluation")


def add_arguments(parser: CommandParser) -> None:
    """Add the flags of `whet eval`."""
    parser.usage = "whet eval AGENT --tasks FILE --model MODEL [--model MODEL ...] [options]"
    add_agent_flags(parser)
    add_tasks_flags(parser, held_out=False)
    group = parser.group("models")
    group.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="[NAME=]MODEL",
        help="name, folder, adapter, run, checkpoint; repeatable",
    )
    group.add_argument(
        "--endpoint",
        metavar="URL",
        help="OpenAI-compatible URL that serves the --model names",
    )
    group.add_argument(
        "--key-variable",
        metavar="NAME",
        help="variable with its API key (default OPENAI_API_KEY)",
    )
    group.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="[NAME=]FILE",
        help="prompts of NAME or of all: file, optimize-prompt run",
    )
    parser.group("evaluation")
    parser.group("output").add_argument(
        "--results",
        metavar="FILE",
        help="JSON lines to append to (default: in the run)",
    )
    add_resume_flag(parser, "or extend a run")
    add_output_flags(parser)
    add_config_flags(parser, SHOWN, only=SECTIONS)
    parser.add_examples(
        "whet eval agent.py:answer --tasks held_out.jsonl --model tiny --model mine",
    )
    parser.set_defaults(run=run_eval)


def run_eval(args: argparse.Namespace) -> int:
    """Run `whet eval`."""
    values = read_config_values(args)
    resolve(values)  # errors in flags are reported before the slow imports
    agent = load_agent(args)
    tasks = load_named_tasks(args, agent, "held_out")
    with requires_extra("`whet eval`", "gateway"):
        from whet.app.evaluation.evaluate import (  # noqa: PLC0415 - imports numpy and starlette
            KEY_VARIABLE,
            prepare_evaluation,
            run_evaluation,
        )
    values = name_resumed_run(args, values)
    console = open_console(quiet=args.quiet, stderr=args.json)
    prepared = prepare_evaluation(
        tasks,
        args.model,
        args.endpoint,
        args.key_variable or KEY_VARIABLE,
        values,
        console,
        resume=args.resume is not None,
        prompts=read_prompts(args.prompt),
    )
    try:
        evaluation = run_evaluation(agent, tasks, prepared, args.results, console)
    except KeyboardInterrupt:
        return report_stopped(format_command("eval", args, KEPT), prepared.folder)
    has_failed = all(s.has_only_failures for s in evaluation.comparison.scores.values())
    if args.json:
        sys.stdout.write(json.dumps(evaluation.as_json()) + "\n")
    else:
        _print_next(console, args, evaluation)
    if has_failed:
        sys.stderr.write("whet: every rollout failed\n")
        return 1
    return 0


def _print_next(console: Console, args: argparse.Namespace, evaluation: "Evaluation") -> None:
    run, scores = evaluation.run, evaluation.comparison.scores
    another = format_command("eval", args, KEPT, ["--model", "MODEL"])
    advice = [f"`whet view {run}` in a browser"]
    if failed := [name for name, each in scores.items() if each.failures]:
        model = f" --model {failed[0]}" if len(scores) > 1 else ""
        advice.append(f"`whet show {run}{model} --failed` for errors")
    advice.append(f"`{format_resume(another, RunFolder(run))}` to compare another model")
    console.print(f"next: {', '.join(advice)}", highlight=False, soft_wrap=True)
