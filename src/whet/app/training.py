"""A whole run: evaluate the base model, train it, evaluate again, report."""

import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from whet import loop as on_policy
from whet import overlapped
from whet.app.comparison import Comparison, compare
from whet.app.display import Display
from whet.app.evaluation import evaluate, plan_trials, read_scores
from whet.app.folder import RunFolder
from whet.app.given import Surroundings
from whet.app.scores import Interval, Scores
from whet.app.tasks import training_plan
from whet.app.tracked import comparison_metrics, tracked
from whet.app.wire import NOTHING, Run, open_run
from whet.protocols import Algorithm
from whet.runners.agent import Agent
from whet.tracking.tracking import Tracking
from whet.types import Attempt, Metrics, Outcome, StepRecord

logger = logging.getLogger(__name__)

TOTALS = (
    "rollouts",
    "failed_rollouts",
    "calls",
    "rows",
    "trained_rollouts",
    "trained_tokens",
    "unproven_rows",
)
"""Metrics of steps whose sum says something of the run."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to."""

    run: Path
    steps: tuple[StepRecord, ...]
    comparison: Comparison | None
    """`base` against `trained` on the held-out tasks, if there were any."""
    seconds: float
    """Of this process; a resumed run does not count its earlier ones."""

    @property
    def gain_ci95(self) -> Interval | None:
        """Of the gain in the first measure: greedy reward, unless that was not asked for."""
        if self.comparison is None:
            return None
        return next(iter(self.comparison.gains.values()))["trained"].ci95

    def total(self, metric: str) -> int:
        """A metric summed over the steps."""
        return round(sum(step.metrics.get(metric, 0.0) for step in self.steps))

    def as_json(self) -> dict[str, object]:
        """The numbers of the run."""
        return {
            "seconds": round(self.seconds, 1),
            "steps": len(self.steps),
            "before": self._side("base"),
            "after": self._side("trained"),
            "gain_ci95": list(self.gain_ci95) if self.gain_ci95 else None,
            "comparison": self.comparison.as_json() if self.comparison else None,
            "tasks": self.comparison.tasks if self.comparison else 0,
            **{name: self.total(name) for name in TOTALS},
            "rewards": [round(step.metrics["reward"], 4) for step in self.steps],
            "run": str(self.run),
        }

    def metrics(self) -> Metrics:
        """The same for trackers: totals of the run, and what the comparison says."""
        totals = {name: float(self.total(name)) for name in TOTALS}
        compared: Metrics = comparison_metrics(self.comparison) if self.comparison else {}
        return {"seconds": self.seconds, "steps": len(self.steps), **totals, **compared}

    def _side(self, name: str) -> dict[str, float] | None:
        """A mean for each measure, and how many rollouts failed."""
        if self.comparison is None:
            return None
        found = {measure: of[name].mean for measure, of in self.comparison.measures.items()}
        return {**found, "failed": len(self.comparison.scores[name].failures)}


async def run_training(
    agent: Agent,
    tasks: Sequence[JsonValue],
    held_out: Sequence[JsonValue],
    folder: RunFolder,
    display: Display,
    algorithm: Algorithm | None = None,
    surroundings: Surroundings = NOTHING,
) -> Result:
    """Do what is left of a run in this process.

    An `algorithm` of the user's own stands for the one the config names.
    """
    folder.keep_tasks(tasks, held_out)

    def on_outcome(attempt: Attempt, outcome: Outcome) -> None:
        display.ended(1)

    parts = open_run(
        agent,
        folder,
        algorithm=algorithm,
        surroundings=surroundings,
        on_outcome=on_outcome,
        progress=display.note,
    )
    async with parts as run:
        return await train_and_compare(run, tasks, held_out, display)


async def train_and_compare(
    run: Run, tasks: Sequence[JsonValue], held_out: Sequence[JsonValue], display: Display
) -> Result:
    """Do what is left of a run. Whatever the store has already is not done again."""
    began = time.monotonic()
    async with tracked(run.folder, display.note) as tracking:
        before = await _evaluation("before", held_out, run, display)
        await _steps(tasks, run, display, tracking)
        after = await _evaluation("after", held_out, run, display)
        await run.trainer.export(run.folder.model)
        result = Result(
            run=run.folder.path,
            steps=tuple(await run.store.steps()),
            comparison=_compare(before, after, run),
            seconds=time.monotonic() - began,
        )
        tracking.finish(result.metrics())
    run.folder.write_report(result.as_json())
    return result


async def _evaluation(
    when: str, held_out: Sequence[JsonValue], run: Run, display: Display
) -> Scores | None:
    if not held_out:
        return None
    trials = plan_trials(when, held_out, run.config)
    display.phase(f"evaluate {when}", len(trials))
    return read_scores(trials, await evaluate(trials, collector=run.collector, directory=run.store))


async def _steps(
    tasks: Sequence[JsonValue], run: Run, display: Display, tracking: Tracking
) -> None:
    config = run.config

    def tell(record: StepRecord) -> None:
        display.step(record, config.steps)
        tracking.step(record.step + 1, record.metrics)

    for record in await run.store.steps():
        tell(record)
    display.phase("train", config.tasks_per_step * config.group_size)
    loop = overlapped if config.loop.name == "overlapped" else on_policy
    records = loop.train(
        training_plan(tasks, config),
        config,
        checkpoints=run.folder.checkpoints,
        collector=run.collector,
        algorithm=run.algorithm,
        trainer=run.trainer,
        log=run.store,
    )
    async for record in records:
        _forget_others(run.folder.checkpoints, record.checkpoint)
        tell(record)
        display.phase("train", config.tasks_per_step * config.group_size)


def _forget_others(checkpoints: Path, keep: str) -> None:
    """Only the newest checkpoint is ever restored; the others are disk."""
    for folder in checkpoints.iterdir():
        if folder.name != keep:
            shutil.rmtree(folder, ignore_errors=True)


def _compare(before: Scores | None, after: Scores | None, run: Run) -> Comparison | None:
    if before is None or after is None:
        return None
    return compare({"base": before, "trained": after}, run.config.evaluation)
