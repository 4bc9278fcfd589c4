"""Evaluation by policy: models compared on the tasks in which each of several policies acted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from whet.app.evaluation.comparison import Comparison, compare, format_gain, format_mean
from whet.app.evaluation.statistics import Scores
from whet.app.evaluation.trials import Trial
from whet.config import EvaluationConfig
from whet.protocols import CallLog

READ_AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class PolicyUse:
    """The calls of one policy in the rollouts of a model."""

    tasks: frozenset[int]
    """Indexes of the tasks in which it made a call."""
    calls: int
    sampled_tokens: int


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """One policy in an evaluation: its tasks, on which the models are compared."""

    comparison: Comparison
    uses: Mapping[str, PolicyUse]
    """By model; a model whose calls name no policy has no entry."""

    def as_json(self) -> dict[str, object]:
        """All numbers, by model."""
        return {
            name: {
                **numbers,
                "tasks": self.comparison.tasks,
                "calls": use.calls if use else None,
                "sampled_tokens": use.sampled_tokens if use else None,
            }
            for name, numbers in self.comparison.summarize_models().items()
            for use in [self.uses.get(name)]
        }


async def read_uses(log: CallLog, trials: Sequence[Trial]) -> dict[str, PolicyUse]:
    """Count the calls of each policy in ended trials."""
    tasks = {trial.rollout.id: trial.task for trial in trials}
    ids, found = list(tasks), dict[str, PolicyUse]()
    for start in range(0, len(ids), READ_AT_ONCE):
        for trajectory in await log.trajectories(ids[start : start + READ_AT_ONCE], failed=True):
            task = tasks[trajectory.attempt.rollout.id]
            for call in trajectory.calls:
                known = found.get(call.origin.policy, PolicyUse(frozenset(), 0, 0))
                sampled = sum(len(generation.tokens) for generation in call.generations)
                found[call.origin.policy] = PolicyUse(
                    known.tasks | {task}, known.calls + 1, known.sampled_tokens + sampled
                )
    return found


def compare_by_policy(
    scores: Mapping[str, Scores],
    uses: Mapping[str, Mapping[str, PolicyUse]],
    policies: Sequence[str],
    config: EvaluationConfig,
) -> dict[str, PolicyResult]:
    """Compare the models on the tasks in which a policy acted, for each policy."""
    results: dict[str, PolicyResult] = {}
    for policy in policies:
        own = {model: each[policy] for model, each in uses.items() if policy in each}
        tasks = sorted(frozenset[int]().union(*(use.tasks for use in own.values())))
        selected = {model: _select(each, tasks) for model, each in scores.items()}
        results[policy] = PolicyResult(compare(selected, config), own)
    return results


def _select(scores: Scores, tasks: Sequence[int]) -> Scores:
    new_index = {task: index for index, task in enumerate(tasks)}
    failed = zip(scores.failed_tasks, scores.failures, strict=True)
    kept = [(new_index[task], failure) for task, failure in failed if task in new_index]
    return Scores(
        greedy=tuple(scores.greedy[task] for task in tasks if scores.greedy),
        sampled=tuple(scores.sampled[task] for task in tasks if scores.sampled),
        failures=tuple(failure for _, failure in kept),
        failed_tasks=tuple(index for index, _ in kept),
    )


def print_by_policy(console: Console, results: Mapping[str, PolicyResult]) -> None:
    """Print a table with a row for each policy and measure of the tasks in which it acted."""
    first = next(iter(results.values())).comparison
    base, *others = first.scores
    table = Table(title="by policy: the tasks in which it acted", title_justify="left")
    for title in ("policy", "", "tasks", "calls"):
        table.add_column(title, justify="left" if title in ("policy", "") else "right")
    for name in first.scores:
        table.add_column(name, justify="right")
    for name in others:
        table.add_column("gain" if len(others) == 1 else f"{name} - {base}", justify="right")
    for policy, result in results.items():
        found = result.comparison
        calls = sum(use.calls for use in result.uses.values())
        if not calls:
            table.add_row(policy, "no call", "0", "0")
        for measure in found.measures:
            values = [format_mean(found, measure, name) for name in found.scores]
            gains = [format_gain(found, measure, name) for name in others]
            table.add_row(policy, measure, str(found.tasks), str(calls), *values, *gains)
    console.print(table)
