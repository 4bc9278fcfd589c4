"""What a run came to, for people: a table, a curve in the terminal and one as a picture."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from whet.app.comparison import print_comparison
from whet.app.display import two_columns
from whet.app.training import Result

BLOCKS = " ▁▂▃▄▅▆▇█"


def print_report(console: Console, result: Result) -> None:
    """Base against trained, the learning curve, and the account of tokens."""
    if result.comparison:
        print_comparison(console, result.comparison, "held-out accuracy")
    rewards = [step.metrics["reward"] for step in result.steps]
    for line in curve(rewards):
        console.print(line, highlight=False, soft_wrap=True)
    trained = result.total("trained_rollouts")
    per_rollout = result.total("rows") / trained if trained else 0.0
    console.print(
        two_columns(
            "every trained token is a sampled token in its own context",
            [
                ("rollouts", f"{result.total('rollouts'):,}"),
                ("failed rollouts", f"{result.total('failed_rollouts'):,}"),
                ("model calls", f"{result.total('calls'):,}"),
                ("rollouts with a signal", f"{trained:,}"),
                ("rows", f"{result.total('rows'):,}"),
                ("rows per rollout", f"{per_rollout:.2f}"),
                ("tokens trained", f"{result.total('trained_tokens'):,}"),
                ("unproven rows", f"{result.total('unproven_rows'):,}"),
            ],
        )
    )


def curve(values: Sequence[float], height: int = 6) -> list[str]:
    """A curve of values from 0 to 1 in lines of text, one column a value."""
    if not values:
        return []
    lines: list[str] = []
    for level in reversed(range(height)):
        label = "1.0" if level == height - 1 else "0.0" if level == 0 else "   "
        cells = "".join(_block(max(0.0, min(1.0, v)) * height - level) * 2 for v in values)
        lines.append(f"{label} ┤{cells}")
    lines.append(f"    └{'─' * (2 * len(values))}  mean reward of steps 1 to {len(values)}")
    return lines


def draw_picture(result: Result, file: Path) -> None:
    """The learning curve as a PNG."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - a second's import, only for this
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    steps = [step.step + 1 for step in result.steps]
    rewards = [step.metrics["reward"] for step in result.steps]
    axes.plot(steps, rewards, marker="o", color="#1f6f8b", label="training reward (sampled)")
    if result.comparison:
        measure, by_model = next(iter(result.comparison.measures.items()))
        for style, (name, found) in zip((":", "--"), by_model.items(), strict=True):
            axes.axhline(found.mean, linestyle=style, color="#444444")
            axes.axhspan(*found.ci95, color="#444444", alpha=0.08)
            axes.annotate(
                f"{name}, {measure}, held out: {found.mean:.0%}",
                (1.0, found.mean),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="bottom",
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1},
            )
    axes.set(xlabel="step", ylabel="reward", title="whet: learning curve")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if all(0 <= reward <= 1 for reward in rewards):
        axes.set_ylim(-0.03, 1.08)
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(file)


def _block(part: float) -> str:
    return BLOCKS[round(max(0.0, min(1.0, part)) * (len(BLOCKS) - 1))]
