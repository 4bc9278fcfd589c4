"""`whet runs` and `whet clean`: list the runs of a directory, and delete some."""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from whet.app.cli.display import open_console
from whet.app.cli.flags import CommandParser, add_dir_flag
from whet.app.run_folder import RunFolder, read_object
from whet.errors import ConfigError
from whet.io.files import stat_files
from whet.io.text import escape_control_characters, format_count

DEV_KIND = "dev"
"""Kind of the runs of `whet dev`."""
EVALUATION_KIND = "eval"

State = Literal["running", "done", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run as `whet runs` lists it."""

    name: str
    kind: str
    model: str
    state: State
    """`failed` trained nothing, `stopped` may be resumed."""
    steps: int
    """Steps done, as far as the report knows, or the metrics of a run without one."""
    reward: float | None
    """Mean reward of the last step."""
    gain: float | None
    """Gain of the trained model on held-out tasks, in the first measure of the report."""
    rewards: tuple[float | None, ...]
    """Mean reward of each step, from where `steps` is."""
    changed: float
    bytes: int


def list_runs(directory: Path) -> list[RunSummary]:
    """List the runs of a directory, the newest first."""
    found: list[RunSummary] = []
    for file in (directory / "runs").glob("*/config.json"):
        with suppress(FileNotFoundError):  # it was deleted meanwhile
            found.append(summarize_folder(RunFolder(file.parent)))
    return sorted(found, key=lambda run: -run.changed)


def find_newest(directory: Path) -> str:
    """Return the name of the newest run of a directory. Raises ConfigError if there is none."""
    runs = list_runs(directory)
    if not runs:
        raise ConfigError(f"no runs in {str(directory)!r}: `whet demo` or `whet train` makes one")
    return runs[0].name


def choose_model(folder: RunFolder, model: str | None) -> str | None:
    """The model of an evaluation whose rollouts are read; None for another run.

    Raises:
        ConfigError: there is no such model, or none is named and there are several.
    """
    names, run = folder.list_models(), folder.path.name
    if not names and model is None:
        return None
    if not names:
        raise ConfigError(f"the run {run!r} is not an evaluation of models: leave {model!r} out")
    if model is None and len(names) == 1:
        return names[0]
    if model not in names:
        found = f"the evaluation {run!r} has the models {', '.join(names)}: choose one"
        raise ConfigError.phrase(
            python=f"{found} with model={names[-1]!r}", command=f"{found} with --model {names[-1]}"
        )
    return model


def summarize_folder(folder: RunFolder) -> RunSummary:
    """Summarize a run by the files of its folder."""
    config, report = read_object(folder.config_file), folder.read_report()
    files = stat_files(folder.path)
    rewards: list[float | None] = list(report.get("rewards") or ())
    steps = int(report.get("steps") or 0)
    state: State = "stopped"
    if folder.is_in_use():
        state = "running"
    elif report:
        state = "failed" if report.get("problem") else "done"
    elif folder.read_kind() == DEV_KIND:
        state = "done"  # it is not resumed
    if not report or state == "running":
        rewards = folder.read_rewards() or rewards
        steps = max(steps, len(rewards))
    return RunSummary(
        name=folder.path.name,
        kind=folder.read_kind(),
        model=": ".join(filter(None, (config.get("model"), ", ".join(config.get("policies", ()))))),
        state=state,
        steps=steps,
        reward=rewards[-1] if rewards else None,
        gain=_read_gain(report),
        rewards=tuple(rewards),
        changed=max((file.st_mtime for file in files), default=0.0),
        bytes=sum(file.st_size for file in files),
    )


def _read_gain(report: dict[str, Any]) -> float | None:  # Any: a report of any kind of run
    before, after = report.get("before"), report.get("after")
    if not before or not after:
        return None
    for measure, base in before.items():
        trained = after.get(measure)
        if measure != "failed" and base is not None and trained is not None:
            return trained - base
    return None


def add_arguments(parser: CommandParser) -> None:
    """Add the flags of `whet runs`, or of `whet clean` if that is the parser's command."""
    is_clean = parser.prog.endswith("clean")
    parser.usage = "whet clean [RUN ...] [options]" if is_clean else "whet runs [options]"
    group = parser.group("runs")
    add_dir_flag(group)
    if is_clean:
        group.add_argument(
            "runs",
            nargs="*",
            metavar="RUN",
            help="runs to delete (default: those of `whet dev`)",
        )
        group.add_argument("--failed", action="store_true", help="delete runs that trained nothing")
        group.add_argument("--yes", action="store_true", help="delete; without it, only list them")
    else:
        parser.group("output").add_argument(
            "--json", action="store_true", help="print one JSON array instead of a table"
        )
    parser.set_defaults(run=run_clean if is_clean else run_list)


def run_list(args: argparse.Namespace) -> int:
    """Run `whet runs`."""
    runs = list_runs(Path(args.dir))
    if args.json:
        sys.stdout.write(json.dumps([asdict(run) for run in runs]) + "\n")
        return 0
    console = open_console()
    if not runs:
        console.print(f"no runs in {args.dir}: `whet demo` or `whet train` makes one")
        return 0
    _print_table(console, runs)
    console.print("`whet view RUN` opens its dashboard, `whet show RUN` prints its rollouts,")
    console.print("`whet clean` deletes runs of `whet dev`")
    return 0


def run_clean(args: argparse.Namespace) -> int:
    """Run `whet clean`.

    Raises:
        ConfigError: a run that is named does not exist, or is in use.
    """
    if args.runs and args.failed:
        raise ConfigError(f"found --failed and the run {args.runs[0]!r}: leave one out")
    runs = {run.name: run for run in list_runs(Path(args.dir))}
    for name in args.runs:
        if name not in runs:
            raise ConfigError(f"there is no run {name!r} in {args.dir!r}: see `whet runs`")
        if runs[name].state == "running":
            raise ConfigError(f"the run {name!r} is in use by another process: stop it first")
    chosen = [runs[name] for name in dict.fromkeys(args.runs)]
    if not args.runs:
        chosen = [
            run
            for run in runs.values()
            if run.state != "running"
            and (run.kind == DEV_KIND or (args.failed and run.state == "failed"))
        ]
    console = open_console()
    if not chosen:
        console.print("nothing to delete")
        return 0
    _print_table(console, chosen)
    if not args.yes:
        console.print(f"nothing was deleted: `--yes` deletes {format_count(len(chosen), 'run')}")
        return 0
    for run in chosen:
        shutil.rmtree(Path(args.dir) / "runs" / run.name)
    size = sum(run.bytes for run in chosen) / 2**20
    console.print(f"deleted {format_count(len(chosen), 'run')}, {size:.0f} MiB")
    return 0


def build_narrow_table(first: str) -> Table:
    """Build a table for 80 columns: without lines, the first column whole, to be copied."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    return table


def print_rows(console: Console, table: Table, notes: Sequence[str]) -> None:
    """Print a table of one line a row, with the note of each row, if it has one, whole below it."""
    lines = console.render_lines(table, pad=False)
    shown: list[RenderableType] = []
    for line, note in zip(lines, ["", *notes], strict=True):  # the first line is the header
        shown.append(Segments([*line, Segment.line()]))
        if note:
            text = Text(escape_control_characters(note), "red")
            shown.append(Padding(text, (0, 0, 0, 2)))
    console.print(Group(*shown), end="")  # one output in notebooks


def _print_table(console: Console, runs: list[RunSummary]) -> None:
    """Print the runs; where the terminal is narrow, without the columns that matter least."""
    left_out: list[str] = []
    unlimited = console.options.update(max_width=10_000)
    table = _build_table(runs, left_out)
    for title in ("MiB", "kind"):
        if Measurement.get(console, unlimited, table).maximum > console.width:
            left_out.append(title)
            table = _build_table(runs, left_out)
    console.print(table)


def _build_table(runs: list[RunSummary], left_out: Sequence[str]) -> Table:
    columns: dict[str, list[str]] = {
        "run": [run.name for run in runs],
        "kind": [run.kind for run in runs],
        "model": [run.model for run in runs],
        "state": [run.state for run in runs],
        "steps": [str(run.steps) for run in runs],
        "reward": ["-" if run.reward is None else f"{run.reward:.2f}" for run in runs],
        "gain": ["-" if run.gain is None else f"{run.gain:+.2f}" for run in runs],
        "age": [_format_age(time.time() - run.changed) for run in runs],
        "MiB": [f"{run.bytes / 2**20:.0f}" for run in runs],
    }
    shown = {title: cells for title, cells in columns.items() if title not in left_out}
    table = build_narrow_table("run")
    for title in shown:
        if title == "model":
            table.add_column(title, overflow="fold", min_width=len(title))
        elif title != "run":
            justify = "left" if title in ("kind", "state") else "right"
            table.add_column(title, justify=justify, no_wrap=True)
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    return table


def _format_age(seconds: float) -> str:
    """Format a time as seconds, minutes, hours or days."""
    for unit, length, limit in (("s", 1, 60), ("m", 60, 3600), ("h", 3600, 2 * 86400)):
        if seconds < limit:
            return f"{max(0, seconds) / length:.0f}{unit}"
    return f"{seconds / 86400:.0f}d"
