"""Trainers of several policies behind the interface of one."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from anyio import to_thread

from whet.config import AdamStep, LossConfig
from whet.io.files import atomic_folder
from whet.protocols import TrainingBackend
from whet.types import GenerationId, Metrics, Row


class PolicyTrainers(TrainingBackend):
    """The weights of several policies as one: published, saved and restored together.

    A checkpoint has a folder for each of them, and so has an export. Frozen policies have none.
    """

    def __init__(self, trainers: Mapping[str, TrainingBackend]) -> None:
        self._trainers = trainers

    def take_log_ratios(self) -> Mapping[GenerationId, Sequence[float]]:
        found = [trainer.take_log_ratios() for trainer in self._trainers.values()]
        return {id: values for each in found for id, values in each.items()}

    async def publish(self) -> int:
        """Publish all; the version is the number of optimizer steps of all policies."""
        return sum([await trainer.publish() for trainer in self._trainers.values()])

    async def snapshot(self) -> Callable[[Path], None]:
        writes = {name: await trainer.snapshot() for name, trainer in self._trainers.items()}

        def write(folder: Path) -> None:
            with atomic_folder(folder) as to:
                for name, write_one in writes.items():
                    write_one(to / name)

        return write

    async def save(self, folder: Path) -> None:
        await to_thread.run_sync(await self.snapshot(), folder)

    async def restore(self, folder: Path) -> None:
        for name, trainer in self._trainers.items():
            await trainer.restore(folder / name)

    async def export(self, folder: Path) -> None:
        with atomic_folder(folder) as to:
            for name, trainer in self._trainers.items():
                await trainer.export(to / name)

    async def forward_backward(self, rows: Sequence[Row], loss: LossConfig) -> Metrics:
        self._refuse()

    async def recompute_logprobs(self, rows: Sequence[Row]) -> list[Row]:
        self._refuse()

    async def optim_step(self, adam: AdamStep) -> Metrics:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise TypeError("rows are trained by the trainer of their policy: use update_policies")
