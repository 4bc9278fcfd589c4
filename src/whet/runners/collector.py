"""Collect finished groups of rollouts through the queue."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from whet.config import FailureRewardConfig
from whet.protocols import CallLog, Collector, RolloutQueue
from whet.types import Group, Mode, Rollout, Trajectory

logger = logging.getLogger(__name__)

PROGRESS_STEPS = 32


@dataclass(kw_only=True)
class QueueCollector(Collector):
    """Enqueues rollouts, waits for them and reads the trajectories, whichever runner runs them."""

    queue: RolloutQueue
    log: CallLog
    resources: Mapping[str, int | Literal["latest"]] = field(default_factory=dict[str, int])
    """Resources of every rollout, besides its own."""
    failure_reward: FailureRewardConfig = field(default_factory=FailureRewardConfig)
    """Rewards of failed rollouts by kind; those of other kinds are left out."""
    on_ended: Callable[[int], None] | None = None
    """Called while rollouts are waited for, with the number of those that ended since."""

    async def collect(self, rollouts: Sequence[Rollout]) -> list[Group]:
        ids = [rollout.id for rollout in rollouts]
        await self.begin(rollouts)
        await self._wait(ids)
        groups: dict[str, list[Trajectory]] = {rollout.group: [] for rollout in rollouts}
        any_reward = self.failure_reward != FailureRewardConfig()
        for trajectory in await self.log.trajectories(ids, failed=any_reward):
            rewarded = self._reward_failure(trajectory)
            if rewarded is not None:
                groups[trajectory.attempt.rollout.group].append(rewarded)
        failures = await self.log.failures(ids)
        if failures:
            # The ids begin with the evaluation that they are of, or with `train`.
            warning = f"{len(failures)} of {len(ids)} rollouts failed ({ids[0]} to {ids[-1]})"
            if any(groups.values()) or rollouts[0].mode is not Mode.TRAIN:
                warning += f", such as: {next(iter(failures.values()))}"
            logger.warning(warning)  # without a reason where the error that ends the run has it
        return list(groups.values())

    def _reward_failure(self, trajectory: Trajectory) -> Trajectory | None:
        """Return a failed trajectory with the reward of its kind, if it has one.

        One without a model call is left out: nothing that the model sampled made it fail.
        """
        if trajectory.failure is None:
            return trajectory
        reward = self.failure_reward.model_dump().get(trajectory.failure.kind)
        if reward is None or not trajectory.calls:
            return None
        return trajectory.model_copy(update={"reward": reward})

    async def begin(self, rollouts: Sequence[Rollout]) -> None:
        await self.queue.enqueue(
            [
                rollout.model_copy(update={"resources": {**self.resources, **rollout.resources}})
                for rollout in rollouts
            ]
        )

    async def wait(self, rollouts: Sequence[str]) -> None:
        await self.queue.wait(rollouts)

    async def _wait(self, ids: Sequence[str]) -> None:
        # Part after part: rollouts of a later part that ended meanwhile are reported at once.
        size = len(ids) if self.on_ended is None else -(-len(ids) // PROGRESS_STEPS)
        for start in range(0, len(ids), size or 1):
            part = ids[start : start + size]
            await self.queue.wait(part)
            if self.on_ended is not None:
                self.on_ended(len(part))
