"""A log of steps that fails once: at the commit of the second step."""

from collections.abc import Mapping

from whet.errors import StoreError
from whet.protocols import StepLog
from whet.types import NO_ADVANTAGES, GenerationId, StepRecord


class FailingLog(StepLog):
    """Raises at the second step, before or after it has passed the record on."""

    def __init__(self, log: StepLog, *, commits: bool) -> None:
        """With `commits` the step is committed, and only the reply is lost."""
        self._log = log
        self._commits = commits

    async def commit(
        self,
        record: StepRecord,
        *,
        advantages: Mapping[GenerationId, float] = NO_ADVANTAGES,
        epoch: int | None = None,
    ) -> None:
        if record.step != 1 or self._commits:
            await self._log.commit(record, advantages=advantages, epoch=epoch)
        if record.step == 1:
            raise StoreError("lost touch")

    async def steps(self, *, after: int = -1, limit: int | None = None) -> list[StepRecord]:
        return await self._log.steps(after=after, limit=limit)

    async def advantages(self, step: int) -> dict[GenerationId, float]:
        return await self._log.advantages(step)
