"""Tracker for MLflow: a server, or a database file beside the runs."""

import logging
import os
import time

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from whet.config import TrackingConfig
from whet.errors import ConfigError, boundary
from whet.io.text import hide_passwords
from whet.protocols import Tracker
from whet.training.tracking.run import TrackedRun, TrackerState
from whet.types import Metrics

MAX_PARAM_CHARACTERS = 500
MAX_BATCH = 100
"""MLflow's limits on the length of a parameter, and on parameters in a request."""

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # The end of a run waits a minute; MLflow would retry for many.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
"""Defaults for variables that the user has not set."""


class MlflowTracker(Tracker):
    """Writes an MLflow run in the project's experiment; a resumed run continues it."""

    def __init__(self, config: TrackingConfig, run: TrackedRun) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        beside = run.folder.parent.parent / "mlflow.db"
        own = f"sqlite:///{beside.absolute()}"
        uri = config.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI") or own
        try:
            with boundary(ConfigError, f"MLflow cannot start at {uri!r}"):
                self._client = MlflowClient(tracking_uri=uri)
                self._run = self._open(config.project, run, hide_passwords(uri))
                history = self._client.get_metric_history(self._run, "reward")
        except ConfigError as error:  # MLflow's own messages have the address, too
            raise ConfigError(hide_passwords(str(error))) from error.__cause__
        self.last_step = max((metric.step for metric in history), default=0)

    def step(self, step: int, metrics: Metrics) -> None:
        self._log(metrics, step)
        self.last_step = step

    def finish(self, result: Metrics) -> None:
        self._log({f"result/{name}": value for name, value in result.items()}, self.last_step)
        self._client.set_terminated(self._run)

    def close(self) -> None:
        pass

    def _open(self, project: str, run: TrackedRun, shown_uri: str) -> str:
        """Continue the MLflow run that was begun at the address, or begin one; returns its id."""
        state = TrackerState(run, "mlflow")
        known = state.read()
        if known.get("uri") == shown_uri:
            begun = str(known["run"])
            self._client.update_run(begun, status="RUNNING")
        else:
            begun = self._begin(project, run)
            state.write({"uri": shown_uri, "run": begun})
        return begun

    def _begin(self, project: str, run: TrackedRun) -> str:
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project)
        begun = self._client.create_run(experiment, run_name=run.name).info.run_id
        settings = [Param(key, str(v)[:MAX_PARAM_CHARACTERS]) for key, v in run.settings().items()]
        for start in range(0, len(settings), MAX_BATCH):
            self._client.log_batch(begun, params=settings[start : start + MAX_BATCH])
        return begun

    def _log(self, values: Metrics, step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)
