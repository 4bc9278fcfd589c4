"""Several policies in one run: each is credited by its own algorithm and trained on its own calls.

A recorded call names the policy that sampled it. A policy sees a step as if the run were its own:
the groups have its calls alone, a rollout in which it made no call is not compared, and the
completed steps have its metrics. Calls of other policies stay in its rows only as context.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from whet.config import RunConfig
from whet.protocols import Algorithm, TrainingBackend
from whet.training.diagnosis import build_cause_metrics, count_causes
from whet.training.step import StepBatch, Stopwatch, credit_groups, update_policy
from whet.training.step_metrics import STEP_TOTALS, compute_reward_metrics
from whet.types import (
    Call,
    Credit,
    GenerationId,
    Group,
    Metrics,
    Reward,
    StepRecord,
    Trajectory,
)

logger = logging.getLogger(__name__)

VERSION = "version"


@dataclass(frozen=True, slots=True)
class Learner:
    """A policy that is trained: its settings, its algorithm and its trainer."""

    name: str
    config: RunConfig
    """That of the run with the policy's own values."""
    algorithm: Algorithm
    trainer: TrainingBackend


class PolicyAlgorithm(Algorithm):
    """Credit of several policies, each by its own algorithm on its own calls."""

    def __init__(self, learners: Sequence[Learner]) -> None:
        self._learners = learners

    async def credit(self, groups: Sequence[Group], past: Sequence[StepRecord]) -> list[Credit]:
        found = defaultdict[str, dict[GenerationId, float | tuple[float, ...]]](dict)
        for learner in self._learners:
            own = [select_calls(group, learner.name) for group in groups]
            before = select_metrics(past, learner.name)
            # A group without its calls has nothing to compare, and no place among its groups.
            present = [group for group in own if group]
            for credit in await credit_groups(learner.algorithm, present, before):
                found[credit.trajectory.attempt.id] |= credit.advantages
        whole = {t.attempt.id: t for group in groups for t in group}
        return [Credit(whole[attempt], found[attempt]) for attempt in whole if attempt in found]


async def update_policies(
    learners: Sequence[Learner],
    batch: StepBatch,
    done: Sequence[StepRecord],
    config: RunConfig,
    timer: Stopwatch,
    trainer: TrainingBackend,
) -> dict[str, float]:
    """Run the updates of every policy on its own calls; return the metrics of the step.

    Those of a policy have its name as prefix, as `planner/loss`. Those without are of the run.
    """
    metrics = compute_reward_metrics(batch.rollouts, batch.groups, batch.zero_signal, config)
    metrics |= dict.fromkeys(STEP_TOTALS, 0.0)
    metrics |= build_cause_metrics(count_causes(batch.zero_signal, config))
    for learner in learners:
        own, name = select_batch(batch, learner.name), learner.name
        before = select_metrics(done, name)
        found: dict[str, float] = {"rows": 0.0}
        if own.groups:
            found = await update_policy(
                own, before, learner.config, timer, learner.trainer, policy=name
            )
        elif not any(record.metrics.get("calls") for record in before):
            logger.warning(
                "no call of step %d was for policy %r: agents choose it by this model name, or as "
                "llms[%r]",
                len(done) + 1,
                name,
                name,
            )
        found[VERSION] = await learner.trainer.publish()
        metrics |= {f"{name}/{key}": value for key, value in found.items()}
        metrics |= {key: metrics[key] + found.get(key, 0.0) for key in STEP_TOTALS}
    # Policies may be trained on the same rollouts, which count once.
    credited = {credit.trajectory.attempt.rollout.id for credit in batch.credits}
    metrics["trained_rollouts"] = min(metrics["trained_rollouts"], len(credited))
    return metrics


def select_batch(batch: StepBatch, policy: str) -> StepBatch:
    """The part of a step that concerns a policy: the rollouts with its calls, and its credit."""
    credits: list[Credit] = []
    for credit in batch.credits:
        own = _collect_generations(credit.trajectory.calls, policy)
        advantages = {id: value for id, value in credit.advantages.items() if id in own}
        if advantages:  # of the whole trajectory: rows need the context of every call
            credits.append(replace(credit, advantages=advantages))
    groups = [group for group in (select_calls(g, policy) for g in batch.groups) if group]
    credited = {credit.trajectory.attempt.rollout.group for credit in credits}
    took_part = {t.attempt.rollout.id for group in groups for t in group}
    return StepBatch(
        rollouts=tuple(rollout for rollout in batch.rollouts if rollout.id in took_part),
        groups=tuple(groups),
        credits=tuple(credits),
        zero_signal=tuple(g for g in groups if g[0].attempt.rollout.group not in credited),
    )


def select_calls(group: Group, policy: str) -> list[Trajectory]:
    """The trajectories of a group in which a policy made calls, with those calls alone."""
    return [own for trajectory in group if (own := _select_calls(trajectory, policy)).calls]


def select_metrics(records: Sequence[StepRecord], policy: str) -> list[StepRecord]:
    """The completed steps as a policy sees them: with its own version and metrics.

    Algorithms and the trainer read their history from these.
    """
    prefix = f"{policy}/"
    selected: list[StepRecord] = []
    for record in records:
        own = {k.removeprefix(prefix): v for k, v in record.metrics.items() if k.startswith(prefix)}
        update = {"metrics": own, "version": round(own.get(VERSION, 0))}
        selected.append(record.model_copy(update=update))
    return selected


def read_versions(metrics: Metrics) -> dict[str, int]:
    """The version of each policy by the metrics of a step; none in a run of one."""
    found = ((name.rpartition("/"), value) for name, value in metrics.items())
    return {policy: round(value) for (policy, _, key), value in found if policy and key == VERSION}


def _select_calls(trajectory: Trajectory, policy: str) -> Trajectory:
    calls = tuple(call for call in trajectory.calls if call.origin.policy == policy)
    rewards = tuple(reward for reward in trajectory.rewards if _is_reward_for(reward, calls))
    return trajectory.model_copy(update={"calls": calls, "rewards": rewards})


def _is_reward_for(reward: Reward, calls: Sequence[Call]) -> bool:
    """Whether a reward is for the attempt, or for one of the calls or their agents."""
    target = reward.target
    if target is None:
        return True
    return any(
        target.call in (None, call.id) and target.agent in (None, call.origin.agent)
        for call in calls
    )


def _collect_generations(calls: Sequence[Call], policy: str) -> set[GenerationId]:
    return {id for call in calls if call.origin.policy == policy for id in call.generations_by_id}
