"""What a person sees while a run works."""

import shlex
import sys
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from whet.app.folder import RunFolder
from whet.config import RunConfig
from whet.types import StepRecord


class Display(Protocol):
    """Someone who watches a run."""

    def note(self, text: str) -> None:
        """Say one line."""
        ...

    def phase(self, name: str, rollouts: int) -> None:
        """A phase of so many rollouts begins."""
        ...

    def ended(self, count: int) -> None:
        """So many more attempts ended."""
        ...

    def step(self, record: StepRecord, steps: int) -> None:
        """A training step is done and durable."""
        ...


class ConsoleDisplay(Display):
    """One line a step, and a bar under them for what is under way.

    Without a terminal the bar is left out and the lines remain.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rollouts  {task.fields[left]}"),
            console=console,
        )
        self._task = self._bar.add_task("starting", total=None, left="")
        self._live = Live(self._bar, console=console, refresh_per_second=8, transient=True)
        self._left = ""
        self._header = False

    def __enter__(self) -> "ConsoleDisplay":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def phase(self, name: str, rollouts: int) -> None:
        self._bar.reset(self._task, description=name, total=rollouts, left=self._left)
        if name.startswith("evaluate") and not self._console.is_terminal:
            self.note(f"{name}: {rollouts} rollouts")

    def ended(self, count: int) -> None:
        self._bar.advance(self._task, count)

    def step(self, record: StepRecord, steps: int) -> None:
        if not self._header:
            self._header = True
            names = f"{'step':>9} {'reward':>7} {'solved':>20}"
            self.note(f"{names}  {'tokens':>7} {'seconds':>8}  left")
        metrics = record.metrics
        seconds = metrics["collect_seconds"] + metrics["train_seconds"]
        left = (steps - record.step - 1) * seconds
        self._left = f"about {left:.0f} s left"
        bar = "█" * round(20 * max(0.0, min(1.0, metrics["reward"])))
        self.note(
            f"{record.step + 1:>4}/{steps:<4} {metrics['reward']:>7.2f} {bar:<20}  "
            f"{metrics.get('trained_tokens', 0):>7.0f} {seconds:>8.1f}  {left:.0f} s"
        )


def two_columns(title: str, rows: list[tuple[str, str]]) -> Table:
    """A small table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False, min_width=len(title))
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in rows:
        table.add_row(name, value)
    return table


def stopped(command: str, folder: RunFolder) -> int:
    """Tell how to continue after Ctrl-C; the exit code is the one shells give it."""
    default = RunConfig.model_fields["dir"].default
    directory = folder.path.parent.parent
    where = "" if directory == default else f" --dir {shlex.quote(str(directory))}"
    sys.stderr.write(
        f"whet: stopped, nothing is lost; continue with: {command} --resume {folder.path.name}"
        f"{where}\n"
    )
    return 130
