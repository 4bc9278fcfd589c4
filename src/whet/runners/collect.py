"""Turns rollouts into finished groups, by way of the queue."""

import logging
from collections.abc import Sequence

from whet.protocols import AttemptLog, Collector, RolloutQueue
from whet.types import Group, Rollout, Trajectory

logger = logging.getLogger(__name__)


class QueueCollector(Collector):
    """Enqueues, waits, reads back. Whoever runs the rollouts, here or elsewhere."""

    def __init__(self, *, queue: RolloutQueue, log: AttemptLog) -> None:
        self._queue = queue
        self._log = log

    async def collect(self, rollouts: Sequence[Rollout]) -> list[Group]:
        ids = [rollout.id for rollout in rollouts]
        await self._queue.enqueue(rollouts)
        await self._queue.wait(ids)
        groups: dict[str, list[Trajectory]] = {rollout.group: [] for rollout in rollouts}
        for trajectory in await self._log.trajectories(ids):
            groups[trajectory.attempt.rollout.group].append(trajectory)
        failures = await self._log.failures(ids)
        if failures:
            example = next(iter(failures.values()))
            logger.warning(
                "rollouts failed count=%d of=%d example=%s", len(failures), len(ids), example
            )
        return list(groups.values())
