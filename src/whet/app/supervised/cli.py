"""`whet sft` and `whet dpo`: supervised training on files, or on the rollouts of a run."""

import argparse
import json
import sys
from functools import partial
from typing import TYPE_CHECKING

from whet.app.cli.config_flags import add_config_flags, read_config_values
from whet.app.cli.display import open_console, report_stopped
from whet.app.cli.flags import (
    CommandParser,
    add_output_flags,
    add_resume_flag,
    name_resumed_run,
)
from whet.app.run_folder import RunFolder
from whet.config import resolve
from whet.errors import requires_extra

if TYPE_CHECKING:  # imports torch
    from whet.app.supervised.tuning import TuningKind

SHOWN = {
    "model": ("model", "trainer.weights", "engine.device"),
    "training": (
        *("supervised.epochs", "supervised.batch_size", "supervised.held_out", "adam.lr", "seed"),
    ),
    "output": ("name", "dir", "tracking.names"),
}
KEYS = (
    *("model", "dir", "name", "seed", "engine.device", "engine.max_context"),
    *("gateway.keep_thinking", "trainer", "adam", "selection", "supervised", "tracking"),
)
"""Keys and sections of the config that have a meaning without agents."""
LIMITS = ("min_reward", "best", "min_margin")


def add_arguments(parser: CommandParser) -> None:
    """Add the flags of `whet sft`, or of `whet dpo` if that is the parser's command."""
    kind: TuningKind = "dpo" if parser.prog.endswith("dpo") else "sft"
    parser.usage = f"whet {kind} (DATA | --from RUN) [options]"
    group = parser.group("data")
    what = '"messages" and "tools"' if kind == "sft" else '"prompt", "chosen" and "rejected"'
    group.add_argument("data", nargs="?", metavar="DATA", help=f"JSONL file of objects with {what}")
    group.add_argument(
        "--held-out",
        metavar="FILE",
        help="examples in the same format to measure the loss on, never trained",
    )
    group.add_argument(
        "--from",
        dest="from_run",
        metavar="RUN",
        help="train on the training rollouts of this run, by name or folder",
    )
    if kind == "sft":
        group.add_argument(
            "--min-reward",
            type=float,
            metavar="X",
            help="with --from: minimum reward of a rollout (default: above its group's mean)",
        )
        group.add_argument(
            "--best",
            type=int,
            metavar="N",
            help="with --from: best rollouts of each group (default 1; all with --min-reward)",
        )
    else:
        group.add_argument(
            "--min-margin",
            type=float,
            default=0.0,
            metavar="X",
            help="with --from: minimum difference in reward between the two of a pair (default 0)",
        )
    for title in SHOWN:
        parser.group(title)
    add_resume_flag(parser, "a run")
    add_output_flags(parser)
    more = () if kind == "sft" else ("supervised.beta",)
    shown = SHOWN | {"training": (*SHOWN["training"], *more)}
    add_config_flags(parser, shown, only=KEYS)
    parser.set_defaults(run=partial(_run, kind))


def _run(kind: "TuningKind", args: argparse.Namespace) -> int:
    values = read_config_values(args)
    resolve(values)  # errors in flags are reported before the slow imports
    with requires_extra(f"`whet {kind}`", "local"):
        from whet.app.supervised.tuning import Source, tune  # noqa: PLC0415 - torch
    values = name_resumed_run(args, values)
    limits = {name: vars(args)[name] for name in LIMITS if name in args}
    source = Source(args.data, args.held_out, args.from_run, **limits)
    folders: list[RunFolder] = []
    console = open_console(quiet=args.quiet, stderr=args.json)
    resume = args.resume is not None
    try:
        result = tune(kind, source, values, console, resume=resume, on_folder=folders.append)
    except KeyboardInterrupt:
        if not folders:
            raise
        data = args.data or f"--from {args.from_run}"
        return report_stopped(f"whet {kind} {data}", folders[0])
    if args.json:
        sys.stdout.write(json.dumps(result.as_json()) + "\n")
    return 0
