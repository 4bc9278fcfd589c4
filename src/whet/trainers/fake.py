"""A trainer without a model: it notes what it is given. For tests and dry runs."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from whet.config import AdamConfig, LossConfig
from whet.durable import whole_folder
from whet.errors import TrainerError, boundary
from whet.protocols import Trainer
from whet.types import Metrics, Row

STATE = "state.json"


def _nobody(version: int) -> None:
    """Tell nobody."""


class FakeTrainer(Trainer):
    """Counts as training: every step raises the version, and is remembered by what it trained."""

    def __init__(self, on_publish: Callable[[int], None] = _nobody) -> None:
        """`on_publish` is told each published version, as an engine would be."""
        self._on_publish = on_publish
        self._gradient: list[str] = []
        self.version = 0
        self.trained: list[list[str]] = []
        """The generations of each step's gradient, step by step."""
        self.rows: list[Row] = []
        """Every row this object was given; unlike `trained` not part of a checkpoint."""

    async def forward_backward(self, rows: Sequence[Row], loss: LossConfig) -> Metrics:
        spans = [span for row in rows for span in row.spans]
        for span in spans:
            if not all(map(math.isfinite, (*span.logprobs, *span.advantages, span.weight))):
                self._gradient = []
                raise TrainerError(
                    f"generation {span.generation!r} has numbers that are not finite"
                )
        self.rows += rows
        self._gradient += [span.generation for span in spans]
        # On the policy every ratio is 1: what is left of the losses is the advantage.
        return {
            "loss": -sum(
                advantage * span.weight for span in spans for advantage in span.advantages
            ),
            "trained_tokens": float(sum(row.trained_tokens for row in rows)),
            "mismatch_kl": 0.0,
            "clip_fraction": 0.0,
            "entropy": 0.0,
        }

    async def optim_step(self, adam: AdamConfig) -> Metrics:
        self.trained.append(self._gradient)
        self._gradient = []
        self.version += 1
        return {"grad_norm": 0.0}

    async def publish(self) -> int:
        self._on_publish(self.version)
        return self.version

    async def save(self, folder: Path) -> None:
        with whole_folder(folder) as to:
            self._write(to)

    async def restore(self, folder: Path) -> None:
        with boundary(TrainerError, f"cannot read the checkpoint {str(folder)!r}"):
            state = json.loads((folder / STATE).read_text())
            self.version, self.trained = state["version"], state["trained"]
        self._gradient = []

    async def export(self, folder: Path) -> None:
        with whole_folder(folder) as to:
            self._write(to)

    def _write(self, folder: Path) -> None:
        state = {"version": self.version, "trained": self.trained}
        (folder / STATE).write_text(json.dumps(state))
