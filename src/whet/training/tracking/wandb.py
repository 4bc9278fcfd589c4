"""Tracker for Weights & Biases; offline it needs neither an account nor a network."""

import os
import secrets
import shutil
import sys
from pathlib import Path

if "wandb" not in sys.modules:
    # That of another process, which may still hold a run whose process was killed.
    os.environ.pop("WANDB_SERVICE", None)
import wandb

from whet.config import TrackingConfig
from whet.errors import ConfigError, boundary
from whet.protocols import Tracker
from whet.training.tracking.run import TrackedRun, TrackerState
from whet.types import Metrics

ENVIRONMENT = {"WANDB_ERROR_REPORTING": "false", "WANDB_DISABLE_WEAVE": "true"}
"""Defaults for variables that the user has not set: record metrics and do nothing else."""


class WandbTracker(Tracker):
    """Writes a W&B run; a resumed run continues it under the same id.

    A W&B run cannot be read back, so its last step is kept beside it. Offline, W&B's own process
    writes its file long after a step is handed over, and not at all after a kill: the last step is
    kept at the end, and the folder of a process that was killed is replaced.
    """

    def __init__(self, config: TrackingConfig, run: TrackedRun) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._state = TrackerState(run, "wandb")
        known = self._state.read()
        self._id = known.get("id") or secrets.token_hex(4)
        self.last_step = int(known.get("last_step", 0))
        if killed := known.get("writing"):
            shutil.rmtree(run.folder / "wandb" / killed, ignore_errors=True)
        with boundary(
            ConfigError,
            "W&B cannot start (without an account: set tracking.wandb_mode to 'offline')",
        ):
            self._run = wandb.init(
                project=config.project,
                name=run.name,
                id=self._id,
                dir=run.folder,
                mode=config.wandb_mode,
                config=run.public_config(),
                resume="allow",
                reinit="create_new",
                settings=wandb.Settings(silent=True, console="off"),
            )
        self._remember(writing=Path(self._run.dir).parent.name if self._run.offline else None)

    def step(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)
        self.last_step = step
        if not self._run.offline:
            self._remember()

    def finish(self, result: Metrics) -> None:
        self._run.summary.update({f"result/{name}": value for name, value in result.items()})

    def close(self) -> None:
        self._run.finish()
        self._remember()

    def _remember(self, *, writing: str | None = None) -> None:
        """Keep the last step, and the folder that is being written if a kill would spoil it."""
        self._state.write({"id": self._id, "last_step": self.last_step, "writing": writing})
