"""The phases of a training step, shared by both loops: collect, credit, rows, update."""

import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

from whet.config import RunConfig
from whet.errors import ConfigError, NonFiniteUpdate, boundary
from whet.protocols import Algorithm, Collector, TrainingBackend
from whet.training.diagnosis import (
    build_cause_metrics,
    count_causes,
    explain_causes,
    explain_metrics,
    find_equal_answers,
)
from whet.training.rows import build_rows, normalize
from whet.training.selection import select
from whet.training.shaping import add_length_penalties, mask_truncated
from whet.training.step_metrics import (
    combine_updates,
    compute_reward_metrics,
    compute_row_metrics,
    count_left_out,
)
from whet.training.stopping import is_evaluated
from whet.types import (
    Credit,
    GenerationId,
    Group,
    Metrics,
    Rollout,
    Row,
    StepRecord,
)

logger = logging.getLogger(__name__)

Plan = Callable[[int], Sequence[Rollout]]
"""Maps the index of a group within the run to its `group_size` rollouts."""

Evaluate = Callable[[int], Awaitable[Metrics]]
"""Evaluates the weights after this many steps on the held-out tasks."""


PHASES = ("collect", "credit", "train", "publish", "save", "sampler_wait", "evaluate")
"""Timed in every step; a phase that was not entered counts 0 seconds."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Groups of one step with their credit."""

    rollouts: tuple[Rollout, ...]
    groups: tuple[Group, ...]
    credits: tuple[Credit, ...]
    zero_signal: tuple[Group, ...]
    """Groups without credit, such as those whose rewards are all equal."""

    def advantages(self) -> dict[GenerationId, float]:
        """Mean advantage of each generation with credit."""
        return {id: v for credit in self.credits for id, v in credit.mean_advantages().items()}


class Stopwatch:
    """Seconds spent in each phase of a step."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.seconds = {f"{name}_seconds": 0.0 for name in PHASES}

    def read(self) -> dict[str, float]:
        """Seconds of every phase, and of the step so far."""
        return {**self.seconds, "step_seconds": time.monotonic() - self._began}

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Add the time spent inside to a phase."""
        began = time.monotonic()
        yield
        self.seconds[f"{name}_seconds"] += time.monotonic() - began


def find_first_group(done: Sequence[StepRecord], config: RunConfig) -> int:
    """Return the index of the next step's first group: one after the last consumed."""
    return sum(len(record.consumed) for record in done) // config.group_size


def compute_version_after(done: Sequence[StepRecord]) -> int:
    """Return the policy version after these steps."""
    return done[-1].version if done else 0


async def collect_step(
    plan: Plan,
    done: Sequence[StepRecord],
    config: RunConfig,
    timer: Stopwatch,
    *,
    collector: Collector,
    algorithm: Algorithm,
) -> StepBatch:
    """Collect groups in plan order until `tasks_per_step` of them have a learning signal.

    At most `oversample` times as many groups are collected. Outcomes are durable and the plan is a
    pure function, so a step that is repeated after a crash collects the same groups.
    """
    first = find_first_group(done, config)
    rollouts: list[Rollout] = []
    groups: list[Group] = []
    credits: list[Credit] = []
    credited = set[str]()
    group_budget = config.tasks_per_step * config.algorithm.oversample
    while (missing := min(config.tasks_per_step - len(credited), group_budget)) > 0:
        requested = [r for n in range(missing) for r in plan(first + len(groups) + n)]
        group_budget -= missing
        rollouts += requested
        with timer.phase("collect"):
            groups += add_length_penalties(await collector.collect(requested), config)
        with timer.phase("credit"):  # of all groups: some algorithms normalize over the step
            credits = await credit_groups(algorithm, groups, done)
        credited = {credit.trajectory.attempt.rollout.group for credit in credits}
    names = dict.fromkeys(rollout.group for rollout in rollouts)
    uncredited = [g for name, g in zip(names, groups, strict=True) if name not in credited]
    return StepBatch(tuple(rollouts), tuple(groups), tuple(credits), tuple(uncredited))


async def update_policy(
    batch: StepBatch,
    done: Sequence[StepRecord],
    config: RunConfig,
    timer: Stopwatch,
    trainer: TrainingBackend,
    *,
    policy: str = "",
) -> dict[str, float]:
    """Run the optimizer updates of a step on the collected groups; return its metrics.

    `policy` is named in warnings.
    """
    selected = select(batch.credits, config.selection)
    kept = mask_truncated(selected, config.length)
    built = build_rows(kept)
    metrics: dict[str, float] = {}
    if built.rows:
        with timer.phase("train"):
            metrics |= await _run_updates(built.rows, len(done), config, trainer)
    metrics |= compute_reward_metrics(batch.rollouts, batch.groups, batch.zero_signal, config)
    metrics |= compute_row_metrics(built, compute_version_after(done))
    metrics |= count_left_out(batch.credits, selected, kept)
    metrics |= build_cause_metrics(count_causes(batch.zero_signal, config))
    if built.rows:
        _warn_of_equal_answers(batch.groups, metrics, done)
    elif "reward" in metrics:  # else all rollouts failed, which their collector reports
        _warn_of_no_update(metrics, done, policy)
    return metrics


Update = Callable[
    [StepBatch, Sequence[StepRecord], RunConfig, Stopwatch, TrainingBackend],
    Awaitable[dict[str, float]],
]
"""Runs the optimizer updates of a step: `update_policy` unless there are several policies."""


def _warn_of_equal_answers(
    groups: Sequence[Group], metrics: Metrics, done: Sequence[StepRecord]
) -> None:
    """Warn, once a run, if the answers within half of the groups are equal.

    Once only: the groups of a run that has learned its tasks are equal too.
    """
    before = [record.metrics.get("equal_answer_fraction", 0.0) for record in done]
    if metrics["equal_answer_fraction"] >= 0.5 > max(before, default=0.0):
        equal = Counter(cause for group in groups if (cause := find_equal_answers(group)))
        reasons = "; ".join(explain_causes(equal))
        logger.warning("equal answers in %d of %d groups: %s", equal.total(), len(groups), reasons)


def _warn_of_no_update(metrics: Metrics, done: Sequence[StepRecord], policy: str) -> None:
    """Warn of a step without an update; the reasons are not repeated in steps that follow it."""
    reasons, step = _find_reasons(metrics), f"step {len(done) + 1}"
    step += f" of policy {policy!r}" if policy else ""
    if done and not done[-1].metrics["rows"] and _find_reasons(done[-1].metrics) == reasons:
        logger.warning("%s trained nothing either", step)
    else:
        logger.warning("%s trained nothing: %s", step, explain_metrics([metrics]))


def _find_reasons(metrics: Metrics) -> set[str]:
    return {name for name in metrics if name.startswith("no_signal/")}


async def evaluate_step(
    step: int, config: RunConfig, timer: Stopwatch, evaluate: Evaluate | None
) -> Metrics:
    """Evaluate the published weights on the held-out tasks, if it is due after this step."""
    if evaluate is None or not is_evaluated(step, config):
        return {}
    with timer.phase("evaluate"):
        return await evaluate(step + 1)


async def _run_updates(
    rows: Sequence[Row], step: int, config: RunConfig, trainer: TrainingBackend
) -> dict[str, float]:
    """Update the weights on each mini-batch in turn; one that is not finite is skipped."""
    several = config.loop.mini_batches * config.loop.epochs > 1
    if several and config.loss.old_logprobs == "recomputed":
        rows = await trainer.recompute_logprobs(rows)
    adam = config.adam.build_step(step, config.steps, config.trained_weights)
    rollouts = config.tasks_per_step * config.group_size / config.loop.mini_batches
    updates: list[dict[str, float]] = []
    skipped = 0
    for mini_batch in split_updates(rows, step, config):
        weighted = normalize(mini_batch, config.loss, rollouts=rollouts)
        try:
            metrics = await trainer.forward_backward(weighted, config.loss)
            updates.append({**metrics, **await trainer.optim_step(adam)})
        except NonFiniteUpdate as error:
            # Not the end of the run: a resumed one would meet the same rollouts again.
            logger.warning("update skipped step=%d rows=%d: %s", step, len(mini_batch), error)
            skipped += 1
    return {**combine_updates(updates), "updates": len(updates), "skipped_updates": skipped}


def split_updates(rows: Sequence[Row], step: int, config: RunConfig) -> list[list[Row]]:
    """Return the rows of each update of a step: whole groups, each once per epoch.

    A pure function, so that a step that is repeated after a crash makes the same updates.
    """
    groups = list(dict.fromkeys(row.group for row in rows))
    parts = config.loop.mini_batches
    updates: list[list[Row]] = []
    for epoch in range(config.loop.epochs):
        Random(f"{config.seed} {step} {epoch}").shuffle(groups)
        chosen = [set(groups[part::parts]) for part in range(parts)]
        updates += [[row for row in rows if row.group in names] for names in chosen if names]
    return updates


async def credit_groups(
    algorithm: Algorithm, groups: Sequence[Group], done: Sequence[StepRecord]
) -> list[Credit]:
    """Return the credit that an algorithm gives. Raises ConfigError if it is not valid."""
    name = type(algorithm).__name__
    with boundary(ConfigError, f"the algorithm {name} raised"):
        credits = await algorithm.credit(groups, done)
    known = {t.attempt.id: t for group in groups for t in group}
    for credit in credits:
        rollout = credit.trajectory.attempt.rollout.id
        if credit.trajectory.attempt.id not in known:
            raise ConfigError(f"the algorithm {name} gave credit to {rollout!r}, not of this step")
        _check_credit(credit, name)
    if len({credit.trajectory.attempt.id for credit in credits}) < len(credits):
        raise ConfigError(f"the algorithm {name} gave credit to one trajectory twice")
    return credits


def _check_credit(credit: Credit, name: str) -> None:
    lengths = {
        id: len(generation.tokens)
        for call in credit.trajectory.calls
        for id, generation in call.generations_by_id.items()
    }
    for id, advantage in credit.advantages.items():
        values = advantage if isinstance(advantage, tuple) else (advantage,)
        found = None
        if id not in lengths:
            found = "which is not one of its generations"
        elif isinstance(advantage, tuple) and len(advantage) != lengths[id]:
            found = f"{len(advantage)} numbers for {lengths[id]} tokens"
        elif not all(map(math.isfinite, values)):
            found = f"a number that is not finite: {advantage!r:.80}"
        if found:
            rollout = credit.trajectory.attempt.rollout.id
            raise ConfigError(
                f"the algorithm {name} credits generation {id!r} of rollout {rollout!r}, {found}"
            )
