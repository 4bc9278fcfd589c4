"""Models side by side on the same tasks: as numbers, as a table, as a picture."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from whet.app.scores import Estimate, Scores, estimate, failure_counts, gain, measures
from whet.config import EvaluationConfig

COLOURS = ("#8a8f98", "#1f6f8b", "#d1793a", "#5b8c5a", "#8c5a7f", "#b3a14c")
MOST_BARS = 400
"""Tasks whose change is drawn; of more, evenly spread ones."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several models on the same tasks. The first is what the others are compared with."""

    scores: Mapping[str, Scores]
    measures: Mapping[str, Mapping[str, Estimate]]
    """By measure (`greedy`, `sampled`, `pass@4`), then by model."""
    gains: Mapping[str, Mapping[str, Estimate]]
    """Over the first model, paired by task; by measure, then by model."""

    @property
    def tasks(self) -> int:
        return max((scores.tasks for scores in self.scores.values()), default=0)

    @property
    def is_share(self) -> bool:
        """Whether every reward lies between 0 and 1, so that means read as percentages."""
        rewards = [reward for scores in self.scores.values() for reward in scores.rewards]
        return all(0 <= reward <= 1 for reward in rewards)

    def as_json(self) -> dict[str, object]:
        """All numbers, by model."""
        return {name: self._model(name) for name in self.scores}

    def _model(self, name: str) -> dict[str, object]:
        told: dict[str, object] = {
            measure: _estimate_json(by_model[name]) for measure, by_model in self.measures.items()
        }
        gains = {m: _estimate_json(each[name]) for m, each in self.gains.items() if name in each}
        if gains:
            told["gain"] = gains
        failures = failure_counts(self.scores[name])
        told["failed"] = len(self.scores[name].failures)
        told["failures"] = {k: {"count": n, "example": text} for k, (n, text) in failures.items()}
        return told


def compare(scores: Mapping[str, Scores], config: EvaluationConfig) -> Comparison:
    """What the rewards of some models say about them, and about each against the first."""
    per_task = {
        name: measures(each, pass_reward=config.pass_reward) for name, each in scores.items()
    }
    first = next(iter(per_task.values()))
    base, *others = per_task
    resamples = config.bootstrap
    return Comparison(
        scores=scores,
        measures={
            measure: {
                name: estimate(per_task[name][measure], resamples=resamples) for name in per_task
            }
            for measure in first
        },
        gains={
            measure: {
                name: gain(per_task[base][measure], per_task[name][measure], resamples=resamples)
                for name in others
            }
            for measure in first
        },
    )


def print_comparison(console: Console, comparison: Comparison, title: str) -> None:
    """The table, what it is about, and what was left out."""
    base, *others = comparison.scores
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in comparison.scores:
        table.add_column(name, justify="right")
    for name in others:
        table.add_column("gain" if len(others) == 1 else f"{name} - {base}", justify="right")
    share = comparison.is_share
    for measure, by_model in comparison.measures.items():
        cells = [_value(by_model[name], share, alone=not others) for name in comparison.scores]
        table.add_row(
            measure, *cells, *(_gain(comparison.gains[measure][n], share) for n in others)
        )
    console.print(table)
    about = "paired 95 % intervals" if others else "95 % intervals"
    console.print(f"{comparison.tasks} held-out tasks; in brackets {about} over tasks")
    for name, scores in comparison.scores.items():
        for kind, (count, example) in failure_counts(scores).items():
            console.print(
                f"{name}: {count} evaluation rollouts failed ({kind}) and are left out, such as: "
                f"{example[:200]}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )


def draw_comparison(comparison: Comparison, file: Path) -> None:
    """Bars with intervals, and the change of each task, as a PNG."""
    from matplotlib.axes import Axes  # noqa: PLC0415 - a second's import, only for this
    from matplotlib.figure import Figure  # noqa: PLC0415

    def draw_bars(axes: Axes) -> None:
        width = 0.8 / len(comparison.scores)
        for place, name in enumerate(comparison.scores):
            found = [by_model[name] for by_model in comparison.measures.values()]
            at = [x + (place - (len(comparison.scores) - 1) / 2) * width for x in range(len(found))]
            reach = (
                [each.mean - each.ci95.low for each in found],
                [each.ci95.high - each.mean for each in found],
            )
            axes.bar(at, [e.mean for e in found], width, label=name, color=_colour(place))
            axes.errorbar(
                at, [e.mean for e in found], reach, fmt="none", ecolor="#222222", capsize=3
            )
        axes.set_xticks(range(len(comparison.measures)), list(comparison.measures))
        axes.set(ylabel="reward", title=f"{comparison.tasks} held-out tasks, 95 % intervals")
        if comparison.is_share:
            axes.set_ylim(0, 1.18)  # room for the legend
        axes.legend(loc="upper center", ncols=len(comparison.scores), frameon=False)
        axes.grid(axis="y", alpha=0.3)

    def draw_changes(axes: Axes, measure: str) -> None:
        for place, (name, changes) in enumerate(_changes(comparison, measure).items(), start=1):
            axes.step(range(len(changes)), changes, where="mid", label=name, color=_colour(place))
            axes.fill_between(
                range(len(changes)), changes, step="mid", alpha=0.25, color=_colour(place)
            )
        axes.axhline(0, color="#222222", linewidth=0.8)
        base = next(iter(comparison.scores))
        if comparison.is_share:
            axes.set_ylim(-1.05, 1.05)
        axes.set(
            xlabel="tasks, the most improved first",
            ylabel=f"change against {base}",
            title=f"each task, {measure}",
        )
        axes.legend()
        axes.grid(axis="y", alpha=0.3)

    compared = len(comparison.scores) > 1
    figure = Figure(figsize=(11 if compared else 6, 4.2), dpi=120, layout="constrained")
    left, *right = figure.subplots(1, 2 if compared else 1, squeeze=False)[0]
    draw_bars(left)
    for axes in right:
        # The mean of several samples says more about a task than one greedy try.
        several = "pass@1" in comparison.measures
        draw_changes(axes, "sampled" if several else next(iter(comparison.measures)))
    figure.savefig(file)


def _changes(comparison: Comparison, measure: str) -> dict[str, list[float]]:
    """How much better or worse each task went than with the first model, best first."""
    base, *others = comparison.scores
    found: dict[str, list[float]] = {}
    for name in others:
        before = _per_task(comparison.scores[base], measure)
        after = _per_task(comparison.scores[name], measure)
        pairs = zip(before, after, strict=True)
        changes = sorted((b - a for a, b in pairs if a is not None and b is not None), reverse=True)
        every = -(-len(changes) // MOST_BARS)
        found[name] = changes[:: every or 1]
    return found


def _per_task(scores: Scores, measure: str) -> list[float | None]:
    # What passes does not matter here: the first measure is greedy, or the samples' mean.
    return list(measures(scores, pass_reward=1.0)[measure])


def _value(found: Estimate, share: bool, *, alone: bool) -> str:
    """With its interval where there is no gain to show."""
    low, high = found.ci95
    if share:
        return f"{found.mean:.1%}" + (f"  [{100 * low:.0f}, {100 * high:.0f}]" if alone else "")
    return f"{found.mean:.3f}" + (f"  [{low:.3f}, {high:.3f}]" if alone else "")


def _gain(found: Estimate, share: bool) -> str:
    low, high = found.ci95
    if share:
        return f"{100 * found.mean:+.1f} points  [{100 * low:+.0f}, {100 * high:+.0f}]"
    return f"{found.mean:+.3f}  [{low:+.3f}, {high:+.3f}]"


def _estimate_json(found: Estimate) -> dict[str, object]:
    return {
        "mean": round(found.mean, 6),
        "ci95": [round(found.ci95.low, 6), round(found.ci95.high, 6)],
        "tasks": found.tasks,
    }


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]
