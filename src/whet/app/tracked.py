"""The trackers of a run, from its config: told of every step, closed whatever happens."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from anyio import CancelScope, to_thread

from whet.app.comparison import Comparison
from whet.app.folder import RunFolder
from whet.protocols import Tracker
from whet.tracking import build_tracker
from whet.tracking.run import TrackedRun
from whet.tracking.tracking import PATIENCE_S, Tracking
from whet.types import Metrics

INTERRUPTED_S = 5.0
"""How long a run that was stopped waits for its trackers."""


@asynccontextmanager
async def tracked(folder: RunFolder, warn: Callable[[str], None]) -> AsyncGenerator[Tracking]:
    """Start the trackers the run's config names. Raises ConfigError if one cannot."""
    config = folder.config()
    run = TrackedRun(folder.path.name, folder.path, config.model_dump(mode="json"))

    def build() -> dict[str, Tracker]:
        return {name: build_tracker(name, config.tracking, run) for name in config.tracking.names}

    tracking = Tracking(await to_thread.run_sync(build), warn)
    patience_s = INTERRUPTED_S
    try:
        yield tracking
        patience_s = PATIENCE_S
    finally:
        with CancelScope(shield=True):
            await to_thread.run_sync(tracking.close, patience_s)


def comparison_metrics(comparison: Comparison) -> Metrics:
    """What an evaluation came to, as numbers by name: `trained/greedy`, `gain/greedy` and so on."""
    found: dict[str, float] = {}
    for measure, by_model in comparison.measures.items():
        found |= {f"{name}/{measure}": each.mean for name, each in by_model.items()}
        for each in comparison.gains[measure].values():
            found[f"gain/{measure}"] = each.mean
            found[f"gain_low/{measure}"], found[f"gain_high/{measure}"] = each.ci95
    return found
