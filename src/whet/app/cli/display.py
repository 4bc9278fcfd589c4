"""Progress of a run in the terminal, and its learning curve there and in a notebook."""

import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from whet.app.run_folder import RunFolder
from whet.config import RunConfig
from whet.io.text import escape_control_characters, format_count
from whet.training.stopping import find_best_step, read_headline
from whet.types import StepRecord

MAX_BAR = 20
"""Characters of the bar of a step's reward."""
COLUMNS = 46
"""Characters of the line of a step without its bar."""
BLOCKS = " ▁▂▃▄▅▆▇█"
CURVE_LINES = 6
"""Lines of the curve in a terminal."""
MAX_CHECKPOINTS = 3
"""Newest checkpoints that are named, besides the best."""


def open_console(*, quiet: bool = False, stderr: bool = False) -> Console:
    """Open the terminal, or what output is redirected to, without rich's markup and emoji codes.

    Texts come from agents, models and users: in rich's markup `[/INST]` would be an error, and a
    lone surrogate in any encoding.
    """
    if not stderr:
        escape_output()
    return Console(quiet=quiet, stderr=stderr, markup=False, emoji=False)


def escape_output() -> None:
    """Print characters that stdout cannot encode, such as lone surrogates, escaped as stderr does.

    A stream that is not of a file, as in a notebook, or that is closed stays as it is.
    """
    if isinstance(sys.stdout, TextIOWrapper) and not sys.stdout.closed:
        sys.stdout.reconfigure(errors="backslashreplace")


def print_note(console: Console, text: str) -> None:
    """Print one line, which may quote an agent."""
    # A terminal shows warnings, which are long, broken between words; other lines stay whole.
    is_broken = console.is_terminal and text.startswith("warning")
    text = escape_control_characters(text)
    console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=not is_broken)


class Display:
    """Progress of a run: one line a step, and below in a terminal a bar, in a notebook a curve."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rollouts  {task.fields[left]}"),
            console=console,
        )
        self._task = self._bar.add_task("starting", total=None, left="")
        self._live = Live(self._bar, console=console, refresh_per_second=8, transient=True)
        self._left = ""
        self._header = False
        self._bar_width = MAX_BAR
        if console.is_terminal:  # output that is redirected has no width to fit into
            self._bar_width = max(0, min(MAX_BAR, console.width - COLUMNS))
        self._curve = NotebookCurve() if console.is_jupyter and not console.quiet else None

    def __enter__(self) -> "Display":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def note(self, text: str) -> None:
        """Show one line."""
        print_note(self._console, text)

    def show_phase(self, name: str, rollouts: int) -> None:
        """Show a phase of the run, which has this many rollouts."""
        self._bar.reset(self._task, description=name, total=rollouts, left=self._left)
        if name.startswith("evaluate") and not self._console.is_terminal:
            self.note(f"{name}: {rollouts} rollouts")

    def count_ended(self, count: int) -> None:
        """Count this many more ended attempts."""
        self._bar.advance(self._task, count)

    def show_step(self, record: StepRecord, steps: int) -> None:
        """Show a training step that is recorded."""
        if not self._header:
            self._header = True
            names = f"{'step':>9} {'reward':>7} {self._draw_scale()}"
            self.note(f"{names}  {'tokens':>7} {'seconds':>8}  left")
        metrics = record.metrics
        seconds = metrics["collect_seconds"] + metrics["train_seconds"]
        left = (steps - record.step - 1) * seconds
        self._left = f"about {left:.0f} s left"
        reward = metrics.get("reward")
        shown = "-" if reward is None else f"{reward:.2f}"
        tokens = metrics.get("trained_tokens", 0)
        self._print_step(
            f"{record.step + 1:>4}/{steps:<4} {shown:>7} {self._draw_bar(reward or 0.0)}  "
            f"{tokens:>7.0f} {seconds:>8.1f}  {left:.0f} s",
            [*_format_held_out(record), *_format_reward_components(record)],
        )
        if self._curve is not None:
            self._curve.add(record, steps)

    def _draw_scale(self) -> str:
        return f"{'0':<{self._bar_width - 1}}1" if self._bar_width > 1 else " " * self._bar_width

    def _draw_bar(self, reward: float) -> str:
        """The reward between 0 and 1; one above 1 ends in a plus sign."""
        bar = "█" * round(self._bar_width * max(0.0, min(1.0, reward)))
        return f"{bar[:-1]}+" if bar and reward > 1 else f"{bar:<{self._bar_width}}"

    def _print_step(self, line: str, more: list[str]) -> None:
        """Print the line of a step; what a terminal has no room for is on lines of its own."""
        for text in more:
            if self._console.is_terminal and len(line) + 2 + len(text) > self._console.width:
                self.note(line)
                line = " " * 8
            line += f"  {text}"
        self.note(line)


def draw_curve(rewards: Sequence[float | None], width: int) -> list[str]:
    """Draw the mean rewards of steps as lines of blocks, from 0 to 1 or from lowest to highest.

    Of more steps than columns, neighbors are averaged; a step without a reward is a gap.
    """
    known = [reward for reward in rewards if reward is not None]
    if not known:
        return []
    low, high = min(known), max(known)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    labels = [f"{high:.2f}", *[""] * (CURVE_LINES - 2), f"{low:.2f}"]
    margin = max(map(len, labels))
    most = max(10, width - margin - 2)
    columns = _average_neighbors(rewards, most)
    wide = 2 if 2 * len(columns) <= most else 1
    scale = CURVE_LINES / ((high - low) or 1.0)
    heights = [0.0 if value is None else (value - low) * scale for value in columns]
    lines: list[str] = []
    for level, label in zip(reversed(range(CURVE_LINES)), labels, strict=True):
        cells = "".join(_draw_block(height - level) * wide for height in heights)
        lines.append(f"{label:>{margin}} ┤{cells}")
    axis = f"{'':>{margin}} └{'─' * (wide * len(columns))}"
    return [*lines, axis, f"{'':>{margin}}  mean reward of steps 1 to {len(rewards)}"]


def _draw_block(part: float) -> str:
    """The block of a line that is filled up to this part."""
    return BLOCKS[round(max(0.0, min(1.0, part)) * (len(BLOCKS) - 1))]


def _average_neighbors(values: Sequence[float | None], most: int) -> list[float | None]:
    """Return at most so many values: the mean of neighbors where there are more."""
    if len(values) <= most:
        return list(values)
    columns: list[float | None] = []
    for index in range(most):
        part = values[index * len(values) // most : (index + 1) * len(values) // most]
        known = [value for value in part if value is not None]
        columns.append(sum(known) / len(known) if known else None)
    return columns


class NotebookCurve:
    """Rewards of the steps so far as a picture in a notebook's cell, redrawn after each step."""

    WIDTH, HEIGHT = 480, 120

    def __init__(self) -> None:
        self._rewards: list[tuple[int, float]] = []
        self._held_out: list[tuple[int, float]] = []
        self._handle: Any = None  # IPython has no types for it

    def add(self, record: StepRecord, steps: int) -> None:
        """Show one more step."""
        number, reward, held_out = (
            record.step + 1,
            record.metrics.get("reward"),
            read_headline(record),
        )
        self._rewards += [] if reward is None else [(number, reward)]
        self._held_out += [] if held_out is None else [(number, held_out)]
        notebook: Any = import_module("IPython.display")  # a notebook has it
        picture = notebook.HTML(self.draw(steps))
        if self._handle is None:
            self._handle = notebook.display(picture, display_id=True)
        else:
            self._handle.update(picture)

    def draw(self, steps: int) -> str:
        """The picture as SVG: a line of mean rewards, and circles of held-out measures."""
        values = [value for _, value in (*self._rewards, *self._held_out)]
        low, high = min(0.0, *values, 0.0), max(1.0, *values, 1.0)

        def place(step: int, value: float) -> tuple[float, float]:
            x = self.WIDTH * step / max(1, steps)
            return round(x, 1), round(self.HEIGHT * (high - value) / (high - low), 1)

        line = " ".join(f"{x},{y}" for x, y in (place(*point) for point in self._rewards))
        circles = "".join(
            f'<circle cx="{x}" cy="{y}" r="3"/>' for x, y in (place(*p) for p in self._held_out)
        )
        last = f"{self._rewards[-1][1]:.2f}" if self._rewards else "-"
        title = f"mean reward of steps 1 to {steps}, from {low:g} to {high:g}; now {last}"
        return (
            f'<svg role="img" width="{self.WIDTH + 8}" height="{self.HEIGHT + 28}" '
            f'viewBox="-4 -4 {self.WIDTH + 8} {self.HEIGHT + 28}" stroke="currentColor">'
            f'<rect width="{self.WIDTH}" height="{self.HEIGHT}" fill="none" opacity="0.3"/>'
            f'<polyline points="{line}" fill="none" stroke-width="2"/>{circles}'
            f'<text y="{self.HEIGHT + 18}" stroke="none" fill="currentColor" font-size="12">'
            f"{title}</text></svg>"
        )


def print_start(console: Console, folder: RunFolder, tasks: int) -> None:
    """Print what a run trains, and where it is."""
    if console.quiet:
        return
    config = folder.read_config()
    sizes = format_count(config.steps, "step")
    sizes += f" of {config.tasks_per_step} x {config.group_size} rollouts"
    trained = ", ".join(filter(None, config.trained_policies))
    policies = f", policies {trained}," if trained else ""
    counted = format_count(tasks, "task")
    lines = [f"run {folder.path}: trains {config.model}{policies} on {counted}, {sizes}"]
    if not config.steps:
        lines.append("with 0 steps nothing is trained: its model is the one it starts from")
    if folder.count_reported_steps() >= max(1, config.steps):
        lines.append(
            "the run has ended: this is its result; resume it with more steps to train further"
        )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def print_next(
    console: Console,
    folder: RunFolder,
    steps: Sequence[StepRecord],
    *,
    has_failures: bool = False,
) -> None:
    """Print where the results of a run are, and what to run next."""
    paths, more = f"   picture: {folder.picture}", f"`whet show {folder.path}` as text"
    if has_failures:
        more = f"`whet show {folder.path} --failed` for errors"
    if folder.model.exists():
        first, *_ = folder.read_config().trained_policies
        trained = folder.model / first if first else folder.path
        paths += f"   model: {folder.model}"
        more += f", `whet eval ... --model {trained}` to compare it"
    for line in (
        f"run folder: {folder.path}{paths}",
        *format_checkpoints(folder, steps),
        f"next: `whet view {folder.path}` in a browser, {more}",
    ):
        console.print(line, highlight=False, soft_wrap=True)


def find_checkpoints(folder: RunFolder, steps: Sequence[StepRecord]) -> dict[int, Path]:
    """The kept checkpoints of a run by the number of their steps, from 1, the oldest first."""
    found = {step.step + 1: folder.checkpoints / step.checkpoint for step in steps}
    return {number: path for number, path in found.items() if path.is_dir()}


def format_checkpoints(folder: RunFolder, steps: Sequence[StepRecord]) -> list[str]:
    """A line that names the kept checkpoints of a run and the best of them; none without any."""
    kept, best = find_checkpoints(folder, steps), find_best_step(steps)
    if not kept:
        return []
    shown = [*kept][-MAX_CHECKPOINTS:]
    if best is not None and best.step + 1 in kept:
        shown = sorted({*shown, best.step + 1})
    named = [
        f"{kept[number].name} (after step {number}"
        f"{', the best evaluation' if best is not None and number == best.step + 1 else ''})"
        for number in shown
    ]
    more = f" and {len(kept) - len(shown)} older" if len(kept) > len(shown) else ""
    return [f"checkpoints in {folder.checkpoints}: {', '.join(named)}{more}"]


def _format_held_out(record: StepRecord) -> list[str]:
    """The measure of the evaluation after a step, if there was one."""
    found = read_headline(record)
    return [] if found is None else [f"held out {found:.2f}"]


def _format_reward_components(record: StepRecord) -> list[str]:
    """The means of the named rewards of a step."""
    named = {k.removeprefix("reward/"): v for k, v in record.metrics.items() if "reward/" in k}
    return [f"{name} {value:.2f}" for name, value in named.items()]


def build_two_columns(title: str, rows: list[tuple[str, str]]) -> Table:
    """Build a small table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False, min_width=len(title))
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in rows:
        table.add_row(name, value)
    return table


def report_stopped(command: str, folder: RunFolder) -> int:
    """Print how to continue after Ctrl-C; returns the exit code that shells use for it."""
    if not folder.config_file.exists():  # a start that ends leaves nothing
        sys.stderr.write("whet: stopped before it began; start it again with the same command\n")
        return 130
    sys.stderr.write(f"whet: stopped; continue with: {format_resume(command, folder)}\n")
    return 130


def format_resume(command: str, folder: RunFolder, *, steps: int | None = None) -> str:
    """The command that continues a run: `command`, with its name before a `--`.

    A run that has all its steps needs more `steps`.
    """
    default = RunConfig.model_fields["dir"].default
    directory = folder.path.parent.parent
    where = "" if directory == default else f" --dir {shlex.quote(str(directory))}"
    more = "" if steps is None else f" --steps {steps}"
    before, dashes, after = command.partition(" -- ")
    return f"{before} --resume {shlex.quote(folder.path.name)}{where}{more}{dashes}{after}"
