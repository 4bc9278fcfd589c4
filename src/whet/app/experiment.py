"""Experiment of a run: evaluate the base model, train it, evaluate again; trackers and result."""

import base64
import html
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from anyio import CancelScope, to_thread
from pydantic import JsonValue

from whet.app.cli.display import Display
from whet.app.composition.run import Run
from whet.app.evaluation.comparison import Comparison, compare
from whet.app.evaluation.statistics import Interval, Scores, complete_tasks, compute_measures
from whet.app.evaluation.trials import plan_trials, read_ended_rollouts, read_scores, run_trials
from whet.app.inputs import (
    check_held_out,
    describe_tasks,
    plan_rollouts,
    read_group_rewards,
)
from whet.app.run_folder import RunFolder, check_steps
from whet.config import EvaluationConfig
from whet.io.text import format_count
from whet.protocols import Tracker
from whet.training import async_loop as overlapped
from whet.training import loop as on_policy
from whet.training.diagnosis import explain_metrics
from whet.training.stopping import EVALUATION, explain_stop, find_best_step
from whet.training.tracking import CLOSE_TIMEOUT_S, Tracking, build_tracker
from whet.training.tracking.run import TrackedRun
from whet.types import Metrics, StepRecord

logger = logging.getLogger(__name__)

RUN_TOTALS = (
    "rollouts",
    "failed_rollouts",
    "calls",
    "rows",
    "trained_rollouts",
    "sampled_tokens",
    "trained_tokens",
    "unproven_generations",
)
"""Metrics of steps whose sums over the run a result reports."""

INTERRUPTED_S = 5.0
"""Seconds an interrupted run waits for its trackers."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a run."""

    run: Path
    steps: tuple[StepRecord, ...]
    comparison: Comparison | None
    """`base` and `trained` on the held-out tasks; None without held-out tasks."""
    seconds: float
    """Duration in this process; a resumed run does not count its earlier ones."""
    failures: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of failed training rollouts by reason, the most frequent first."""
    problem: str | None = None
    """Reason why the run ended without training: all rollouts failed, or nothing had a signal."""
    stopped: str | None = None
    """Why the run stopped before its last step: a spent budget, or no better evaluation."""
    model_step: int | None = None
    """Number of steps behind the run's model: with `evaluation.every` those of the best evaluation,
    else all; None without steps."""
    agent: str = ""
    """Name of the agent; empty where other processes run it."""
    trained_on: str = ""
    """Number of training tasks, and where they are from."""

    @property
    def gain_ci95(self) -> Interval | None:
        """95 % interval of the gain in the first measure: greedy reward unless it was off."""
        if self.comparison is None:
            return None
        found = next(iter(self.comparison.gains.values()))["trained"]
        return found.ci95 if found else None

    @property
    def rewards(self) -> list[float | None]:
        """Mean reward of each step; None where all rollouts failed."""
        return [step.metrics.get("reward") for step in self.steps]

    def total(self, metric: str) -> int:
        """A metric summed over the steps."""
        return round(sum(step.metrics.get(metric, 0.0) for step in self.steps))

    def as_json(self) -> dict[str, object]:
        """The numbers of the run."""
        return {
            "seconds": round(self.seconds, 1),
            "steps": len(self.steps),
            "stopped": self.stopped,
            "model_step": self.model_step,
            "before": self._summarize_side("base"),
            "after": self._summarize_side("trained"),
            "gain_ci95": list(self.gain_ci95) if self.gain_ci95 else None,
            "comparison": self.comparison.as_json() if self.comparison else None,
            "tasks": self.comparison.tasks if self.comparison else 0,
            **{name: self.total(name) for name in RUN_TOTALS},
            "failures": dict(self.failures),
            "problem": self.problem,
            "agent": self.agent,
            "trained_on": self.trained_on,
            "rewards": [None if r is None else round(r, 4) for r in self.rewards],
            "run": str(self.run),
        }

    def metrics(self) -> Metrics:
        """The numbers for trackers: totals of the run, and the comparison."""
        totals = {name: float(self.total(name)) for name in RUN_TOTALS}
        compared: Metrics = compute_comparison_metrics(self.comparison) if self.comparison else {}
        return {"seconds": self.seconds, "steps": len(self.steps), **totals, **compared}

    def _repr_html_(self) -> str:
        """Base against trained and the learning curve, as notebooks show a result."""
        lines = [
            f"<p>run {html.escape(str(self.run))}: {format_count(len(self.steps), 'step')}</p>"
        ]
        if self.comparison is not None:
            rows = ["<tr><th></th><th>base</th><th>trained</th></tr>"]
            for measure, by_model in self.comparison.measures.items():
                cells = ["-" if each is None else f"{each.mean:.3f}" for each in by_model.values()]
                rows.append(f"<tr><th>{measure}</th><td>{'</td><td>'.join(cells)}</td></tr>")
            lines.append(f"<table>{''.join(rows)}</table>")
        if (picture := RunFolder(self.run).picture).is_file():
            data = base64.b64encode(picture.read_bytes()).decode()
            lines.append(f'<img alt="learning curve" src="data:image/png;base64,{data}">')
        return "\n".join(lines)

    def _summarize_side(self, name: str) -> dict[str, float | None] | None:
        """Mean of each measure, and the number of failed rollouts."""
        if self.comparison is None:
            return None
        found = {
            measure: each.mean if (each := of[name]) else None
            for measure, of in self.comparison.measures.items()
        }
        return {**found, "failed": len(self.comparison.scores[name].failures)}


async def run_experiment(
    run: Run,
    tasks: Sequence[JsonValue],
    held_out: Sequence[JsonValue],
    display: Display,
    *,
    agent: str = "",
) -> Result:
    """Evaluate, train, evaluate again and export. What the store has already is not repeated.

    The result has the name of the `agent`.

    Raises:
        ConfigError: the store has lost steps of the run.
    """
    began = time.monotonic()
    check_held_out(run.config, held_out)
    run.folder.check_store(len(await run.store.steps()))
    async with open_trackers(run.folder, display.note) as tracking:
        before = await _evaluate("before", "before", held_out, run, display)
        await _train(tasks, held_out, run, display, tracking)
        steps = await run.store.steps()
        problem = await _find_problem(steps, run)
        after, best = None, None
        if problem is None:
            after, best = await _choose_model(steps, held_out, run, display)
            await run.trainer.export(run.folder.model)
        result = Result(
            run=run.folder.path,
            steps=tuple(steps),
            comparison=_compare(before, after, run),
            seconds=time.monotonic() - began,
            failures=await _count_failures(steps, run),
            problem=problem,
            stopped=explain_stop(steps, run.config) if len(steps) < run.config.steps else None,
            model_step=best.step + 1 if best else len(steps) or None,
            agent=agent,
            trained_on=describe_tasks(tasks),
        )
        tracking.finish(result.metrics())
    run.folder.write_report(result.as_json())
    return result


async def _evaluate(
    when: str, name: str, held_out: Sequence[JsonValue], run: Run, display: Display
) -> Scores | None:
    """Run the evaluation rollouts of a name that have not ended; returns the scores of all."""
    if not held_out:
        return None
    trials = plan_trials(name, held_out, run.config)
    ended = await read_ended_rollouts(run.store)
    left = [trial for trial in trials if trial.rollout.id not in ended]
    if left:
        display.show_phase(f"evaluate {when}", len(left))
        ended = await run_trials(left, collector=run.collector, listings=run.store)
    return read_scores(trials, ended)


def _name_trials(steps: int) -> str:
    """Prefix of the evaluation rollouts of the weights after this many steps."""
    return f"step-{steps:06d}"


def compute_evaluation_metrics(scores: Scores, config: EvaluationConfig) -> dict[str, float]:
    """An evaluation of one model as metrics: `eval/greedy`, `eval/sampled` and so on."""
    tasks = complete_tasks([scores])
    found = compute_measures(scores, tasks, pass_threshold=config.pass_threshold)
    means = {f"{EVALUATION}{name}": fmean(values) for name, values in found.items() if values}
    return {**means, f"{EVALUATION}failed_rollouts": len(scores.failures)}


async def _choose_model(
    steps: Sequence[StepRecord], held_out: Sequence[JsonValue], run: Run, display: Display
) -> tuple[Scores | None, StepRecord | None]:
    """Evaluate the last weights. If an earlier evaluation was better, restore the weights of its
    step; returns the scores of the model, and the step if it is not the last."""
    scores = await _evaluate("after", _name_trials(len(steps)), held_out, run, display)
    config = run.config.evaluation
    if not config.every or scores is None or not steps:
        return scores, None
    last = steps[-1].model_copy(update={"metrics": compute_evaluation_metrics(scores, config)})
    best = find_best_step([*steps[:-1], last])
    if best is None or best is last:
        return scores, None
    await run.trainer.restore(run.folder.checkpoints / best.checkpoint)
    await run.trainer.publish()
    return await _evaluate("best", _name_trials(best.step + 1), held_out, run, display), best


async def _train(
    tasks: Sequence[JsonValue],
    held_out: Sequence[JsonValue],
    run: Run,
    display: Display,
    tracking: Tracking,
) -> None:
    config = run.config

    def begin_step() -> None:
        display.show_phase("train", config.tasks_per_step * config.group_size)

    def report(record: StepRecord) -> None:
        display.show_step(record, config.steps)
        tracking.step(record.step + 1, record.metrics)

    async def evaluate(steps: int) -> Metrics:
        scores = await _evaluate(f"step {steps}", _name_trials(steps), held_out, run, display)
        return compute_evaluation_metrics(scores, config.evaluation) if scores else {}

    done = await run.store.steps()
    check_steps(config, len(done))
    for record in done:
        report(record)
    rewards = await read_group_rewards(done, run.store, config)
    begin_step()
    loop = overlapped if config.loop.name == "overlapped" else on_policy
    records = loop.train(
        plan_rollouts(tasks, config, group_rewards=rewards),
        config,
        checkpoints=run.folder.checkpoints,
        collector=run.collector,
        algorithm=run.algorithm,
        trainer=run.trainer,
        log=run.steps,
        evaluate=evaluate,
        update=run.update,
    )
    async with aclosing(records):
        async for record in records:
            if log_ratios := run.trainer.take_log_ratios():
                await to_thread.run_sync(run.folder.save_log_ratios, record.step, log_ratios)
            report(record)
            rewards += await read_group_rewards([record], run.store, config)
            if has_only_failures(record):
                break
            begin_step()


def has_only_failures(record: StepRecord) -> bool:
    """Whether every rollout of a step failed, without a reward for its failure."""
    metrics = record.metrics  # a driver's own steps may lack these
    return metrics.get("rollouts", 0) > 0 and "reward" not in metrics


async def _find_problem(steps: Sequence[StepRecord], run: Run) -> str | None:
    """The reason why a run cannot go on, or has trained nothing; None if it has."""
    if not steps:
        return None
    last = steps[-1]
    if has_only_failures(last):
        reasons = list((await run.store.failures(last.consumed)).values())
        more = "" if len(steps) < run.config.steps else " with more steps"
        return (
            f"every rollout of step {last.step + 1} failed, {len(reasons)} of {len(reasons)}, such "
            f"as: {reasons[0]}; fix the agent, then resume the run {run.folder.path.name!r}{more}"
        )
    if any(step.metrics.get("rows", 1) for step in steps):
        return None
    cause = explain_metrics([step.metrics for step in steps])
    where = "step 1" if len(steps) == 1 else f"steps 1 to {len(steps)}"
    return f"nothing was trained in {where}: {cause}"


async def _count_failures(steps: Sequence[StepRecord], run: Run) -> dict[str, int]:
    consumed = [id for step in steps if step.metrics.get("failed_rollouts") for id in step.consumed]
    reasons = await run.store.failures(consumed) if consumed else {}
    return dict(Counter(reasons.values()).most_common())


def _compare(before: Scores | None, after: Scores | None, run: Run) -> Comparison | None:
    if before is None or after is None:
        return None
    return compare({"base": before, "trained": after}, run.config.evaluation)


@asynccontextmanager
async def open_trackers(folder: RunFolder, warn: Callable[[str], None]) -> AsyncGenerator[Tracking]:
    """Start the trackers of the run's config, and close them in any case.

    Raises:
        ConfigError: a tracker cannot be started.
    """
    config = folder.read_config()
    run = TrackedRun(folder.path.name, folder.path, config.model_dump(mode="json"))

    def build() -> dict[str, Tracker]:
        return {name: build_tracker(name, config.tracking, run) for name in config.tracking.names}

    tracking = Tracking(await to_thread.run_sync(build), warn)
    timeout_s = INTERRUPTED_S
    try:
        yield tracking
        timeout_s = CLOSE_TIMEOUT_S
    finally:
        with CancelScope(shield=True):
            await to_thread.run_sync(tracking.close, timeout_s)


def compute_comparison_metrics(comparison: Comparison) -> Metrics:
    """An evaluation as metrics: `trained/greedy`, `gain/greedy` and so on."""
    found: dict[str, float] = {}
    for measure, by_model in comparison.measures.items():
        found |= {f"{name}/{measure}": each.mean for name, each in by_model.items() if each}
        for each in filter(None, comparison.gains[measure].values()):
            found[f"gain/{measure}"] = each.mean
            if each.ci95:
                found[f"gain_low/{measure}"], found[f"gain_high/{measure}"] = each.ci95
    return found
