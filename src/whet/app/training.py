"""A whole run: evaluate the base model, train it, evaluate again, report."""

import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import JsonValue

from whet import loop
from whet.app.evaluation import Scores, evaluate, evaluation_rollouts, gain_interval, mean
from whet.app.folder import RunFolder
from whet.app.tasks import training_plan
from whet.app.wire import Run, open_run
from whet.runners.agent import Agent
from whet.types import Attempt, Outcome, StepRecord

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to."""

    run: Path
    steps: tuple[StepRecord, ...]
    before: Scores | None
    """None if no tasks were held out."""
    after: Scores | None
    gain_ci95: tuple[float, float] | None
    """Of greedy accuracy, paired by task."""
    seconds: float
    """Of this process; a resumed run does not count its earlier ones."""

    def total(self, metric: str) -> int:
        """A metric summed over the steps."""
        return round(sum(step.metrics.get(metric, 0.0) for step in self.steps))

    def as_json(self) -> dict[str, object]:
        """The numbers of the run."""

        def side(scores: Scores | None) -> dict[str, object] | None:
            if scores is None:
                return None
            return {
                "greedy": mean(scores.greedy),
                "sampled": mean(scores.sampled),
                "failed": scores.failed,
            }

        return {
            "seconds": round(self.seconds, 1),
            "steps": len(self.steps),
            "before": side(self.before),
            "after": side(self.after),
            "gain_ci95": list(self.gain_ci95) if self.gain_ci95 else None,
            "tasks": len(self.after.greedy) if self.after else 0,
            "rollouts": self.total("rollouts"),
            "failed_rollouts": self.total("failed_rollouts"),
            "calls": self.total("calls"),
            "rows": self.total("rows"),
            "trained_rollouts": self.total("trained_rollouts"),
            "trained_tokens": self.total("trained_tokens"),
            "unproven_rows": self.total("unproven_rows"),
            "rewards": [round(step.metrics["reward"], 4) for step in self.steps],
            "run": str(self.run),
        }


async def run_training(
    agent: Agent,
    tasks: Sequence[JsonValue],
    held_out: Sequence[JsonValue],
    folder: RunFolder,
    display: Display,
) -> Result:
    """Do what is left of a run in this process."""
    folder.keep_tasks(tasks, held_out)

    def on_outcome(attempt: Attempt, outcome: Outcome) -> None:
        display.ended(1)

    async with open_run(agent, folder, on_outcome=on_outcome, progress=display.note) as run:
        return await train_and_compare(run, tasks, held_out, display)


async def train_and_compare(
    run: Run, tasks: Sequence[JsonValue], held_out: Sequence[JsonValue], display: Display
) -> Result:
    """Do what is left of a run. Whatever the store has already is not done again."""
    began = time.monotonic()
    before = await _evaluation("before", held_out, run, display)
    await _steps(tasks, run, display)
    after = await _evaluation("after", held_out, run, display)
    await run.trainer.export(run.folder.model)
    result = Result(
        run=run.folder.path,
        steps=tuple(await run.store.steps()),
        before=before,
        after=after,
        gain_ci95=_interval(before, after, run),
        seconds=time.monotonic() - began,
    )
    run.folder.write_report(result.as_json())
    return result


async def _evaluation(
    when: str, held_out: Sequence[JsonValue], run: Run, display: Display
) -> Scores | None:
    if not held_out:
        return None
    rollouts = evaluation_rollouts(when, held_out, run.config)
    display.phase(f"evaluate {when}", len(rollouts))
    return await evaluate(rollouts, collector=run.collector, log=run.store)


async def _steps(tasks: Sequence[JsonValue], run: Run, display: Display) -> None:
    config = run.config
    for record in await run.store.steps():
        display.step(record, config.steps)
    display.phase("train", config.tasks_per_step * config.group_size)
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
        display.step(record, config.steps)
        display.phase("train", config.tasks_per_step * config.group_size)


def _forget_others(checkpoints: Path, keep: str) -> None:
    """Only the newest checkpoint is ever restored; the others are disk."""
    for folder in checkpoints.iterdir():
        if folder.name != keep:
            shutil.rmtree(folder, ignore_errors=True)


def _interval(before: Scores | None, after: Scores | None, run: Run) -> tuple[float, float] | None:
    if before is None or after is None:
        return None
    return gain_interval(before.greedy, after.greedy, resamples=run.config.evaluation.bootstrap)
