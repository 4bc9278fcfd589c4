"""Trackers: keep a run's numbers where people look at them. Only those asked for are imported."""

import importlib.util

from whet.config import TrackingConfig
from whet.errors import MissingExtra
from whet.protocols import Tracker
from whet.tracking.run import TrackedRun

PACKAGES = {
    "jsonl": (),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}
"""What each tracker needs; the extra that brings it has the tracker's name."""


def check_installed(config: TrackingConfig) -> None:
    """Raises MissingExtra if a tracker that is asked for cannot be imported."""
    for name in config.names:
        for package in PACKAGES[name]:
            if importlib.util.find_spec(package) is None:
                raise MissingExtra.of(f"tracking with {name} ({package})", name)


def build_tracker(name: str, config: TrackingConfig, run: TrackedRun) -> Tracker:
    """The tracker of a name. Raises ConfigError if it cannot start."""
    match name:
        case "tensorboard":
            from whet.tracking.tensorboard import TensorBoardTracker  # noqa: PLC0415

            return TensorBoardTracker(run)
        case "wandb":
            from whet.tracking.wandb import WandbTracker  # noqa: PLC0415

            return WandbTracker(config, run)
        case "mlflow":
            from whet.tracking.mlflow import MlflowTracker  # noqa: PLC0415

            return MlflowTracker(config, run)
        case _:
            from whet.tracking.jsonl import JsonlTracker  # noqa: PLC0415

            return JsonlTracker(run)
