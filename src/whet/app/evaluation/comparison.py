"""Comparison of models on the same tasks: numbers, a table, a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from whet.app.evaluation.statistics import (
    AGENT_FAILURES,
    Estimate,
    Scores,
    complete_tasks,
    compute_measures,
    count_failures_by_kind,
    estimate,
    estimate_gain,
)
from whet.config import EvaluationConfig
from whet.io.text import escape_control_characters

COLORS = ("#8a8f98", "#1f6f8b", "#d1793a", "#5b8c5a", "#8c5a7f", "#b3a14c")
ALL_FAILED = "all failed"
"""Shown in place of numbers of a model without a rollout that ended well."""
MAX_BARS = 400
"""Tasks whose change is drawn; of more, an even selection."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several models on the same tasks; the first is the baseline."""

    scores: Mapping[str, Scores]
    compared: Sequence[int]
    """The tasks of all measures: those of which every model has every reward."""
    per_task: Mapping[str, Mapping[str, Sequence[float]]]
    """One number for each compared task; by measure, then by model."""
    measures: Mapping[str, Mapping[str, Estimate | None]]
    """By measure (`greedy`, `sampled`, `pass@4`), then by model; None if no task is compared, or
    every rollout of the model failed."""
    gains: Mapping[str, Mapping[str, Estimate | None]]
    """Gains over the baseline, paired by task; by measure, then by model. None if either side has
    no estimate."""
    is_share: bool
    """Whether all rewards lie between 0 and 1, so that means are shown as percentages."""

    @property
    def tasks(self) -> int:
        return max((scores.tasks for scores in self.scores.values()), default=0)

    def as_json(self) -> dict[str, object]:
        """All numbers and failures, by model."""
        return {
            name: {**found, **self._count_failures(name)}
            for name, found in self.summarize_models().items()
        }

    def summarize_models(self) -> dict[str, dict[str, object]]:
        """Measures and gains, by model."""
        return {name: self._summarize_model(name) for name in self.scores}

    def _summarize_model(self, name: str) -> dict[str, object]:
        values: dict[str, object] = {
            measure: _format_estimate(by_model[name]) for measure, by_model in self.measures.items()
        }
        gains = {m: _format_estimate(each[name]) for m, each in self.gains.items() if name in each}
        if gains:
            values["gain"] = gains
        return values

    def _count_failures(self, name: str) -> dict[str, object]:
        counts = count_failures_by_kind(self.scores[name])
        examples = {kind: {"count": n, "example": text} for kind, (n, text) in counts.items()}
        return {"failed": len(self.scores[name].failures), "failures": examples}

    def describe_tasks(self) -> str:
        """Number of tasks, and of those compared if some are not."""
        if len(self.compared) == self.tasks:
            return f"{self.tasks} held-out tasks"
        return f"{len(self.compared)} of {self.tasks} held-out tasks"


def compare(scores: Mapping[str, Scores], config: EvaluationConfig) -> Comparison:
    """Estimate every measure of every model, and its gain over the first model."""
    compared = complete_tasks(list(scores.values()))
    by_model = {
        name: compute_measures(each, compared, pass_threshold=config.pass_threshold)
        for name, each in scores.items()
    }
    base, *others = by_model
    share = all(0 <= reward <= 1 for each in scores.values() for reward in each.rewards)
    per_task = {
        measure: {name: by_model[name][measure] for name in by_model} for measure in by_model[base]
    }
    bounded = {measure: share or measure.startswith("pass@") for measure in per_task}

    def estimate_mean(measure: str, name: str) -> Estimate | None:
        if scores[name].has_only_failures:
            return None
        return estimate(per_task[measure][name], bounded=bounded[measure])

    def estimate_change(measure: str, name: str) -> Estimate | None:
        if scores[base].has_only_failures or scores[name].has_only_failures:
            return None
        values = per_task[measure]
        return estimate_gain(values[base], values[name], bounded=bounded[measure])

    return Comparison(
        scores=scores,
        compared=compared,
        per_task=per_task,
        measures={
            measure: {name: estimate_mean(measure, name) for name in by_model}
            for measure in per_task
        },
        gains={
            measure: {name: estimate_change(measure, name) for name in others}
            for measure in per_task
        },
        is_share=share,
    )


def print_comparison(console: Console, comparison: Comparison, title: str) -> None:
    """Print the table, its number of tasks, and the failed rollouts."""
    base, *others = comparison.scores
    table = Table(title=title, title_justify="left", min_width=len(title))
    table.add_column("")
    for name in comparison.scores:
        table.add_column(name, justify="right")
    for name in others:
        table.add_column("gain" if len(others) == 1 else f"{name} - {base}", justify="right")
    for measure in comparison.measures:
        cells = [format_mean(comparison, measure, name) for name in comparison.scores]
        table.add_row(measure, *cells, *(format_gain(comparison, measure, name) for name in others))
    console.print(table)
    about = "paired 95 % intervals" if others else "95 % intervals"
    console.print(f"{comparison.describe_tasks()}; in brackets {about} over tasks")
    if len(comparison.compared) < comparison.tasks:
        console.print(
            "the other tasks have a rollout that failed for a reason other than the model, and are "
            "left out of every number",
            soft_wrap=True,
        )
    for name, scores in comparison.scores.items():
        for kind, (count, example) in count_failures_by_kind(scores).items():
            console.print(
                f"{name}: {count} evaluation rollouts failed ({kind}) and "
                f"{'count as 0' if kind in AGENT_FAILURES else 'are left out'}, such as: "
                f"{escape_control_characters(example[:200])}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )


def draw_comparison(comparison: Comparison, file: Path) -> None:
    """Write bars with intervals, and the change of each task, as a PNG."""
    from matplotlib.axes import Axes  # noqa: PLC0415 - slow import
    from matplotlib.figure import Figure  # noqa: PLC0415

    def draw_bars(axes: Axes) -> None:
        width = 0.8 / len(comparison.scores)
        for index, name in enumerate(comparison.scores):
            found = [by_model[name] for by_model in comparison.measures.values()]
            at = [x + (index - (len(comparison.scores) - 1) / 2) * width for x in range(len(found))]
            axes.bar(
                at,
                [e.mean if e else 0.0 for e in found],
                width,
                label=name,
                color=_choose_color(index),
            )
            for x, each in zip(at, found, strict=True):
                if each and each.ci95:
                    axes.vlines(x, *each.ci95, color="#222222")
        axes.set_xticks(range(len(comparison.measures)), list(comparison.measures))
        axes.set(ylabel="reward", title=f"{comparison.describe_tasks()}, 95 % intervals")
        if comparison.is_share:
            axes.set_ylim(0, 1.18)  # room for the legend
        axes.legend(loc="upper center", ncols=len(comparison.scores), frameon=False)
        axes.grid(axis="y", alpha=0.3)

    def draw_changes(axes: Axes, measure: str) -> None:
        for index, (name, changes) in enumerate(
            _list_changes(comparison, measure).items(), start=1
        ):
            axes.step(
                range(len(changes)), changes, where="mid", label=name, color=_choose_color(index)
            )
            axes.fill_between(
                range(len(changes)), changes, step="mid", alpha=0.25, color=_choose_color(index)
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
        # The mean of several samples is a better estimate of a task than one greedy rollout.
        several = "pass@1" in comparison.measures
        draw_changes(axes, "sampled" if several else next(iter(comparison.measures)))
    figure.savefig(file)


def _list_changes(comparison: Comparison, measure: str) -> dict[str, list[float]]:
    """Change of each task against the baseline, the most improved first."""
    base, *others = comparison.scores
    per_task = comparison.per_task[measure]
    found: dict[str, list[float]] = {}
    for name in others:
        is_known = comparison.gains[measure][name] is not None
        pairs = zip(per_task[base], per_task[name], strict=True) if is_known else ()
        changes = sorted((after - before for before, after in pairs), reverse=True)
        every = -(-len(changes) // MAX_BARS)
        found[name] = changes[:: every or 1]
    return found


def format_mean(comparison: Comparison, measure: str, name: str) -> str:
    """Format the mean of a model, with its interval if there is no baseline."""
    found, share = comparison.measures[measure][name], comparison.is_share
    if found is None:
        return ALL_FAILED if comparison.scores[name].has_only_failures else "-"
    text = f"{found.mean:.1%}" if share else f"{found.mean:.3f}"
    is_alone = len(comparison.scores) == 1
    return f"{text}  {_format_interval(found, share)}" if is_alone else text


def format_gain(comparison: Comparison, measure: str, name: str) -> str:
    """Format the gain of a model with its interval."""
    base, share = next(iter(comparison.scores)), comparison.is_share
    found = comparison.gains[measure][name]
    if found is None:
        has_failed = any(comparison.scores[each].has_only_failures for each in (base, name))
        return ALL_FAILED if has_failed else "-"
    text = f"{100 * found.mean:+.1f} points" if share else f"{found.mean:+.3f}"
    return f"{text}  {_format_interval(found, share, sign='+')}"


def _format_interval(found: Estimate, share: bool, *, sign: str = "") -> str:
    if found.ci95 is None:
        return "[-]"
    scale, form = (100, f"{sign}.0f") if share else (1, f"{sign}.3f")
    return f"[{', '.join(f'{scale * bound:{form}}' for bound in found.ci95)}]"


def _format_estimate(found: Estimate | None) -> dict[str, object] | None:
    if found is None:
        return None
    interval = [round(bound, 6) for bound in found.ci95] if found.ci95 else None
    return {"mean": round(found.mean, 6), "ci95": interval, "tasks": found.tasks}


def _choose_color(index: int) -> str:
    return COLORS[index % len(COLORS)]
