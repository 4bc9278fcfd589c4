"""Alarms of a run: rules on the metrics of its last steps, the most urgent first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from whet.store.queries.browse import StepRow

WINDOW = 5
"""Latest steps that rules are checked on."""


class Alarm(NamedTuple):
    """A metric that needs attention."""

    metric: str
    value: float
    step: int
    """Counted from 1."""
    message: str


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule that raises an alarm if a metric is bad in each of the last `steps`."""

    metric: str
    is_bad: Callable[[float], bool]
    message: str
    steps: int = 1
    per: str | None = None
    """Metric to divide by before the check."""


RULES = (
    Rule(
        "failed_rollouts", lambda x: x > 0.5, "more than half of the rollouts failed", 1, "rollouts"
    ),
    Rule("unproven_generations", lambda x: x > 0, "generations without proof were not trained"),
    Rule("skipped_updates", lambda x: x > 0, "updates were dropped: loss or gradient not finite"),
    Rule("mismatch_kl", lambda x: x > 0.02, "sampler and trainer disagree"),
    Rule("logprob_gap", lambda x: x > 0.1, "sampler and trainer disagree"),
    Rule(
        "zero_signal_fraction", lambda x: x > 0.8, "most groups have equal rewards and no signal", 3
    ),
    Rule("truncated_fraction", lambda x: x > 0.3, "many answers are cut off at the token limit", 2),
    Rule("entropy", lambda x: x < 0.02, "the policy is nearly deterministic", 3),
    Rule("clip_fraction", lambda x: x > 0.4, "most importance ratios are clipped", 2),
    Rule("staleness_max", lambda x: x > 16, "tokens are many updates old when they are trained", 2),
)


def find_alarms(steps: Sequence[StepRow]) -> list[Alarm]:
    """Return the alarms of a run's last steps."""
    last = steps[-WINDOW:]
    alarms: list[Alarm] = []
    for rule in RULES:
        values = [_read_value(rule, step) for step in last[-rule.steps :]]
        known = [value for value in values if value is not None]
        if len(known) == rule.steps and all(map(rule.is_bad, known)):
            alarms.append(Alarm(rule.metric, known[-1], last[-1].step + 1, rule.message))
    return alarms


def _read_value(rule: Rule, step: StepRow) -> float | None:
    value = step.metrics.get(rule.metric)
    if value is None or rule.per is None:
        return value
    return value / (step.metrics.get(rule.per) or 1.0)
