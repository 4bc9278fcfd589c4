"""The metrics of a training step: of what it collected, of its rows and of its updates."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev

from whet.config import RunConfig
from whet.training.diagnosis import find_equal_answers
from whet.training.rows import Rows
from whet.training.shaping import find_truncated
from whet.types import JUDGE, LENGTH_PENALTY, Credit, Group, Metrics, Rollout, Trajectory

logger = logging.getLogger(__name__)

STEP_TOTALS = (
    "rows",
    "trained_rollouts",
    "unproven_generations",
    "constrained_generations",
    "unselected_generations",
    "masked_generations",
    "row_tokens",
    "trained_tokens",
    "computed_tokens",
    "updates",
    "skipped_updates",
)
"""Metrics of training that add up, over the updates of a step and over policies."""


def compute_reward_metrics(
    rollouts: Sequence[Rollout],
    groups: Sequence[Group],
    zero_signal: Sequence[Group],
    config: RunConfig,
) -> dict[str, float]:
    """Compute the metrics of what a step collected, before anything is trained on it."""
    trajectories = [trajectory for group in groups for trajectory in group]
    without = [t.attempt.rollout.id for t in trajectories if not t.calls]
    if without:
        logger.warning(
            "%d of %d rollouts made no model call, such as %s: is a reply cached, or does the "
            "agent's client use another base URL?",
            len(without),
            len(trajectories),
            without[0],
        )
    succeeded = [trajectory for trajectory in trajectories if trajectory.failure is None]
    truncated = [bool(find_truncated(trajectory)) for trajectory in trajectories]
    rewards = [trajectory.reward for trajectory in trajectories]
    keys = (*config.algorithm.reward_keys, *config.algorithm.logged_keys)
    if config.length.is_active:
        keys += (LENGTH_PENALTY,)
    known = {"reward": fmean(rewards), "reward_std": pstdev(rewards)} if rewards else {}
    return {
        **known,
        **{
            f"reward/{key}": _compute_mean(_read_emitted(t, key) for t in trajectories)
            for key in keys
        },
        "groups": len(groups),
        "zero_signal_fraction": len(zero_signal) / len(groups),
        "equal_answer_fraction": _compute_mean(find_equal_answers(g) is not None for g in groups),
        "rollouts": len(rollouts),
        "failed_rollouts": len(rollouts) - len(succeeded),
        "rollouts_without_calls": len(without),
        "truncated_fraction": _compute_mean(truncated),
        "calls": sum(len(trajectory.calls) for trajectory in trajectories),
        "sampled_tokens": sum(_count_sampled(trajectory) for trajectory in trajectories),
        **_compute_judge_metrics(trajectories),
    }


def compute_row_metrics(built: Rows, version: int) -> dict[str, float]:
    """Compute the metrics of the rows of a step, at the policy version before it."""
    segments = [segment for row in built.rows for segment in row.segments]
    ages = [version - sampled for segment in segments for sampled in segment.versions]
    return {
        "rows": len(built.rows),
        "trained_rollouts": len({row.rollout for row in built.rows}),
        "unproven_generations": len(built.unproven),
        "constrained_generations": len(built.constrained),
        "row_tokens": sum(len(row.tokens) for row in built.rows),
        "calls_per_row": len(segments) / len(built.rows) if built.rows else 0.0,
        "staleness": _compute_mean(ages),
        "staleness_max": max(ages, default=0),
        "off_policy_fraction": _compute_mean(age > 0 for age in ages),
    }


def count_left_out(
    credits: Sequence[Credit], selected: Sequence[Credit], kept: Sequence[Credit]
) -> dict[str, float]:
    """Count the generations with credit that the selection, and then the mask, leaves out."""
    before, between, after = (
        sum(len(credit.advantages) for credit in each) for each in (credits, selected, kept)
    )
    return {"unselected_generations": before - between, "masked_generations": between - after}


def combine_updates(updates: Sequence[Metrics]) -> Metrics:
    """Metrics of a step from those of its updates: totals are added, others are means by token."""
    if len(updates) < 2:
        return updates[0] if updates else {}
    tokens = [update["trained_tokens"] for update in updates]
    means = {
        name: sum(u[name] * n for u, n in zip(updates, tokens, strict=True)) / sum(tokens)
        for name in updates[0]
    }
    return {
        **means,
        **{name: sum(u[name] for u in updates) for name in STEP_TOTALS if name in means},
    }


def _compute_judge_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Verdicts and cost of the judges of a step: scores are means, costs are sums."""
    found = defaultdict[str, list[float]](list)
    for reward in (reward for trajectory in trajectories for reward in trajectory.rewards):
        kind, _, name = reward.key.partition(".")
        if kind == JUDGE and name:
            found[name].append(reward.value)
    means = ("score", "disagreement")
    return {f"{JUDGE}/{n}": fmean(v) if n in means else sum(v) for n, v in found.items()}


def _count_sampled(trajectory: Trajectory) -> int:
    generations = [generation for call in trajectory.calls for generation in call.generations]
    return sum(len(generation.tokens) for generation in generations)


def _read_emitted(trajectory: Trajectory, key: str) -> float:
    return sum(r.value for r in trajectory.rewards if r.key == key)


def _compute_mean(values: Iterable[float]) -> float:
    known = list(values)
    return fmean(known) if known else 0.0
