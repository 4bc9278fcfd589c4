"""A trainer without a model that records the rows it gets. For tests."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from whet.config import AdamStep, LossConfig
from whet.errors import NonFiniteUpdate, TrainerError, boundary
from whet.io.files import atomic_folder
from whet.protocols import TrainingBackend
from whet.types import GenerationId, Metrics, Row

STATE = "state.json"


def _ignore_version(version: int) -> None:
    """Ignore a published version."""


class FakeTrainer(TrainingBackend):
    """Raises the version at every step and records which generations the step trained."""

    def __init__(self, on_publish: Callable[[int], None] = _ignore_version) -> None:
        """`on_publish` is called with each published version, as an engine would be."""
        self._on_publish = on_publish
        self._gradient: list[str] = []
        self._log_ratios: dict[GenerationId, list[float]] = {}
        self.version = 0
        self.trained: list[list[str]] = []
        """The generations of each step's gradient, step by step."""
        self.rows: list[Row] = []
        """Every row this object received; unlike `trained` not part of a checkpoint."""

    async def forward_backward(self, rows: Sequence[Row], loss: LossConfig) -> Metrics:
        segments = [segment for row in rows for segment in row.segments]
        for segment in segments:
            if not all(
                map(math.isfinite, (*segment.logprobs, *segment.advantages, segment.weight))
            ):
                self._gradient = []
                raise NonFiniteUpdate(
                    f"generation {segment.generation!r} has numbers that are not finite"
                )
        self.rows += rows
        self._gradient += [segment.generation for segment in segments]
        self._log_ratios |= {s.generation: [0.0] * len(s.logprobs) for s in segments}
        # On-policy every ratio is 1, and the losses reduce to the advantage.
        return {
            "loss": -sum(
                advantage * segment.weight
                for segment in segments
                for advantage in segment.advantages
            ),
            "trained_tokens": float(sum(row.trained_tokens for row in rows)),
            "mismatch_kl": 0.0,
            "clip_fraction": 0.0,
            "entropy": 0.0,
        }

    async def recompute_logprobs(self, rows: Sequence[Row]) -> list[Row]:
        return [
            replace(row, segments=tuple(replace(s, old_logprobs=s.logprobs) for s in row.segments))
            for row in rows
        ]

    def take_log_ratios(self) -> Mapping[GenerationId, Sequence[float]]:
        taken, self._log_ratios = self._log_ratios, {}
        return taken

    async def optim_step(self, adam: AdamStep) -> Metrics:
        self.trained.append(self._gradient)
        self._gradient = []
        self.version += 1
        return {"grad_norm": 0.0}

    async def publish(self) -> int:
        self._on_publish(self.version)
        return self.version

    async def snapshot(self) -> Callable[[Path], None]:
        state = self._dump_state()
        return lambda folder: _write(folder, state)

    async def save(self, folder: Path) -> None:
        _write(folder, self._dump_state())

    async def restore(self, folder: Path) -> None:
        with boundary(TrainerError, f"cannot read the checkpoint {str(folder)!r}"):
            state = json.loads((folder / STATE).read_text())
            self.version, self.trained = state["version"], state["trained"]
        self._gradient = []

    async def export(self, folder: Path) -> None:
        _write(folder, self._dump_state())

    def _dump_state(self) -> str:
        return json.dumps({"version": self.version, "trained": self.trained})


def _write(folder: Path, state: str) -> None:
    with atomic_folder(folder) as to:
        (to / STATE).write_text(state)
