"""Tracker for TensorBoard, with its own writer, which needs no torch."""
# TensorBoard has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false

import json
import logging
import time
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from whet.protocols import Tracker
from whet.training.tracking.run import TrackedRun
from whet.types import Metrics


class TensorBoardTracker(Tracker):
    """Writes event files to the run's `tensorboard/`; all metrics of a step are one record."""

    def __init__(self, run: TrackedRun) -> None:
        folder = run.folder / "tensorboard"
        self.last_step = max(map(_find_last_step, folder.glob("events.out.tfevents.*")), default=0)
        self._writer = EventFileWriter(str(folder))
        if not self.last_step:
            self._write(0, _build_text("config", json.dumps(run.public_config(), indent=2)))

    def step(self, step: int, metrics: Metrics) -> None:
        self._write(step, *(_build_scalar(name, value) for name, value in metrics.items()))

    def finish(self, result: Metrics) -> None:
        self._write(
            self.last_step,
            *(_build_scalar(f"result/{name}", value) for name, value in result.items()),
        )

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, *values: object) -> None:
        summary = Summary(value=values)
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()
        self.last_step = max(self.last_step, step)


def _build_scalar(name: str, value: float) -> object:
    return Summary.Value(tag=name, simple_value=value)


def _build_text(name: str, text: str) -> object:
    shown = "".join(f"    {line}\n" for line in text.splitlines())  # Markdown for code
    tensor = TensorProto(
        dtype="DT_STRING",
        string_val=[shown.encode()],
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
    )
    about = create_summary_metadata(display_name=name, description="")
    return Summary.Value(tag=name, metadata=about, tensor=tensor)


def _find_last_step(file: Path) -> int:
    """The last step of a file, whose last record may be cut off by a kill."""
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    return max((int(event.step) for event in EventFileLoader(str(file)).Load()), default=0)
