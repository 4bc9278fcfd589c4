"""Table and plot of the candidate prompts of a search."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from whet.errors import requires_extra

if TYPE_CHECKING:
    from whet.app.prompts.search import PromptResult

MAX_WIDTH = 60


def print_candidates(console: Console, result: "PromptResult") -> None:
    """Print the candidates, and the number of held-out tasks on which each is on the frontier."""
    table = Table(title=f"prompts: {result.run.name}")
    for column in ("", "from", "rollouts", "mean reward", "frontier", "prompt"):
        table.add_column(column)
    frontier = result.frontier
    for number, candidate in enumerate(result.candidates):
        text = " ".join(" / ".join(candidate.prompts.values()).split())
        table.add_row(
            f"{number}{' *' if number == result.best else ''}",
            ", ".join(map(str, candidate.parents)) or "start",
            str(candidate.rollouts),
            f"{candidate.mean:.3f}",
            str(frontier.get(number, 0)),
            text if len(text) <= MAX_WIDTH else f"{text[: MAX_WIDTH - 3]}...",
        )
    console.print(table)
    console.print(f"best: {result.run / 'prompts.json'}", soft_wrap=True, highlight=False)


def draw_candidates(result: "PromptResult", path: Path) -> None:
    """Draw the mean reward of each candidate over the rollouts, and the best so far."""
    with requires_extra("the picture", "gateway"):
        from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    order = sorted(result.candidates, key=lambda candidate: candidate.rollouts)
    spent = [candidate.rollouts for candidate in order]
    means = [candidate.mean for candidate in order]
    best = [max(means[: n + 1]) for n in range(len(means))]
    axes.step(spent, best, where="post", color="#1f6f8b", label="best so far")
    on_front = [c for n, c in enumerate(result.candidates) if n in result.frontier]
    axes.scatter(spent, means, color="#8a8f98", label="candidate")
    axes.scatter(
        [c.rollouts for c in on_front],
        [c.mean for c in on_front],
        color="#d1793a",
        label="on the frontier",
    )
    axes.set(xlabel="rollouts", ylabel="mean held-out reward", title=result.run.name)
    axes.legend()
    figure.savefig(path)
