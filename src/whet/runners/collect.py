"""Turns rollouts into finished groups, by way of the queue."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from whet.protocols import AttemptLog, Collector, RolloutQueue
from whet.types import Group, Rollout, Trajectory

logger = logging.getLogger(__name__)

PARTS = 32
"""In how many steps progress is told."""


class QueueCollector(Collector):
    """Enqueues, waits, reads back. Whoever runs the rollouts, here or elsewhere."""

    def __init__(
        self,
        *,
        queue: RolloutQueue,
        log: AttemptLog,
        resources: Mapping[str, int | Literal["latest"]] | None = None,
        on_ended: Callable[[int], None] | None = None,
    ) -> None:
        """Every rollout is given `resources` besides its own.

        `on_ended` is told, while they are waited for, that so many more have ended.
        """
        self._queue = queue
        self._log = log
        self._resources = dict(resources or {})
        self._on_ended = on_ended

    async def collect(self, rollouts: Sequence[Rollout]) -> list[Group]:
        ids = [rollout.id for rollout in rollouts]
        await self.begin(rollouts)
        await self._wait(ids)
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

    async def begin(self, rollouts: Sequence[Rollout]) -> None:
        await self._queue.enqueue([self._stamped(rollout) for rollout in rollouts])

    async def wait(self, rollouts: Sequence[str]) -> None:
        await self._queue.wait(rollouts)

    def _stamped(self, rollout: Rollout) -> Rollout:
        return rollout.model_copy(update={"resources": self._resources | rollout.resources})

    async def _wait(self, ids: Sequence[str]) -> None:
        # A part after the other: those of a later part that ended meanwhile are seen at once.
        size = len(ids) if self._on_ended is None else -(-len(ids) // PARTS)
        for start in range(0, len(ids), size or 1):
            part = ids[start : start + size]
            await self._queue.wait(part)
            if self._on_ended is not None:
                self._on_ended(len(part))
