"""Report of a finished run: tables and a learning curve in the terminal, and a PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from whet.app.cli.display import build_two_columns, draw_curve
from whet.app.evaluation.comparison import print_comparison
from whet.app.evaluation.statistics import Estimate
from whet.app.experiment import Result
from whet.app.run_folder import RunFolder
from whet.io.text import escape_control_characters
from whet.training.stopping import read_headline

if TYPE_CHECKING:  # slow import
    from matplotlib.figure import Figure

NO_MEASURES: Mapping[str, Mapping[str, Estimate | None]] = {}
MAX_REASONS = 8
MAX_REASON_CHARS = 300


def print_report(console: Console, result: Result) -> None:
    """Print base against trained, the learning curve, and the token counts."""
    if result.comparison:
        print_comparison(console, result.comparison, "mean reward of held-out tasks")
    _print_steps(console, result)
    lines = draw_curve(result.rewards, console.width)
    if lines and len(result.steps) > 1:
        console.print("\n".join(lines), highlight=False, soft_wrap=True)  # one output in notebooks
    trained = result.total("trained_rollouts")
    per_rollout = f"{result.total('rows') / trained:.2f}" if trained else "-"
    proof = "every trained token was sampled in its own context"
    console.print(
        build_two_columns(
            f"training data ({proof if result.total('trained_tokens') else 'nothing was trained'})",
            [
                ("rollouts", f"{result.total('rollouts'):,}"),
                ("failed rollouts", f"{result.total('failed_rollouts'):,}"),
                ("model calls of rollouts that did not fail", f"{result.total('calls'):,}"),
                ("rollouts with a signal", f"{trained:,}"),
                ("rows", f"{result.total('rows'):,}"),
                ("rows per rollout", per_rollout),
                ("tokens trained", f"{result.total('trained_tokens'):,}"),
                ("unproven generations", f"{result.total('unproven_generations'):,}"),
            ],
        )
    )
    if result.failures:
        reasons = [(f"{count:,}", reason) for reason, count in result.failures.items()]
        console.print(build_failure_table(reasons))


def build_failure_table(reasons: Sequence[tuple[str, str]]) -> Table:
    """Build the table of failed rollouts by reason; the rarest are left out."""
    table = Table(title="failed rollouts by reason", title_justify="left", show_header=False)
    table.add_column(justify="right", style="bold")
    table.add_column(overflow="fold")
    for count, reason in reasons[:MAX_REASONS]:
        table.add_row(count, Text(escape_control_characters(reason[:MAX_REASON_CHARS])))
    if len(reasons) > MAX_REASONS:
        table.add_row("", f"and {len(reasons) - MAX_REASONS} other reasons")
    return table


def _print_steps(console: Console, result: Result) -> None:
    """Print why training stopped early, and the step of the model if it is not the last one."""
    steps, lines = len(result.steps), list[str]()
    if result.stopped:
        lines.append(
            f"stopped after step {steps}: {result.stopped}; to continue, resume the run with more"
        )
    if result.model_step is not None and result.model_step < steps:
        lines.append(
            f"the model is that of step {result.model_step}, the best evaluation; it was chosen by "
            "the held-out tasks, so its scores on them are a little too high"
        )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def draw_picture(result: Result, file: Path) -> None:
    """Write a PNG of the learning curve, with the measures on held-out tasks beside it."""
    build_picture(result).savefig(file)


def build_picture(result: Result) -> "Figure":
    """Draw the rewards of training, and in a panel of their own the measures on held-out tasks."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow import
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    held_out = [
        (s.step + 1, read_headline(s)) for s in result.steps if read_headline(s) is not None
    ]
    panels = 2 if result.comparison or held_out else 1
    figure = Figure(figsize=(5.5 * panels, 4), dpi=120, layout="constrained")
    first, *rest = figure.subplots(1, panels, squeeze=False)[0]
    figure.suptitle(f"{result.run.name}: {_read_model(result.run)}")
    steps = [step.step + 1 for step in result.steps]
    rewards = [float("nan") if reward is None else reward for reward in result.rewards]
    first.plot(steps, rewards, marker="o", color="#1f6f8b")
    first.set(xlabel="step", ylabel="mean reward", title="training rollouts, sampled")
    for axes in rest:
        if held_out:
            axes.plot(
                *zip(*held_out, strict=True), marker="s", color="#d1793a", label="after a step"
            )
        measures = result.comparison.measures if result.comparison else NO_MEASURES
        for measure, color in zip(measures, ("#444444", "#1f6f8b"), strict=False):
            for style, (name, found) in zip((":", "--"), measures[measure].items(), strict=True):
                if found is not None:
                    label = f"{name}, {measure}: {found.mean:.2f}"
                    axes.axhline(found.mean, linestyle=style, color=color, label=label)
        axes.set(xlabel="step", ylabel="mean reward", title="held-out tasks")
        axes.set_xlim(*first.get_xlim())
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize="small")
    for axes in (first, *rest):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if all(0 <= reward <= 1 for reward in result.rewards if reward is not None):
            axes.set_ylim(-0.03, 1.08)
        axes.grid(alpha=0.3)
    return figure


def _read_model(run: Path) -> str:
    """The model that a run trains; empty if its folder has no config."""
    folder = RunFolder(run)
    return folder.read_config().model if folder.config_file.is_file() else ""
