"""Early stopping, budget and best step of a run, as functions of the recorded steps."""

from collections.abc import Sequence

from whet.config import RunConfig
from whet.types import StepRecord

EVALUATION = "eval/"
"""Prefix of the metrics of an evaluation on the held-out tasks."""


def is_evaluated(step: int, config: RunConfig) -> bool:
    """Whether the held-out tasks are evaluated after this step; the first step is 0."""
    every = config.evaluation.every
    return every > 0 and ((step + 1) % every == 0 or step + 1 == config.steps)


def read_headline(record: StepRecord) -> float | None:
    """The held-out measure that steps are compared by: greedy reward, or sampled without it."""
    metrics = record.metrics
    return metrics.get(f"{EVALUATION}greedy", metrics.get(f"{EVALUATION}sampled"))


def find_best_step(records: Sequence[StepRecord]) -> StepRecord | None:
    """The first step with the highest held-out measure; None if no step was evaluated."""
    evaluated = [record for record in records if read_headline(record) is not None]
    return max(evaluated, key=lambda record: read_headline(record) or 0.0, default=None)


def explain_stop(done: Sequence[StepRecord], config: RunConfig) -> str | None:
    """Reason why no further step begins: a spent budget, or no better evaluation; else None."""
    budget, patience = config.budget, config.evaluation.patience
    minutes = sum(record.metrics.get("step_seconds", 0.0) for record in done) / 60
    if budget.minutes is not None and minutes >= budget.minutes:
        return f"budget.minutes is spent: {minutes:.1f} of {budget.minutes:g}"
    tokens = sum(record.metrics.get("sampled_tokens", 0.0) for record in done)
    if budget.tokens is not None and tokens >= budget.tokens:
        return f"budget.tokens is spent: {tokens:,.0f} of {budget.tokens:,}"
    best = find_best_step(done)
    if patience and best is not None:
        since = sum(read_headline(record) is not None for record in done[best.step + 1 :])
        if since >= patience:
            return (
                f"no evaluation since step {best.step + 1} was better, and evaluation.patience "
                f"is {patience}"
            )
    return None
