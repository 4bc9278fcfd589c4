"""The run that a tracker records, and a tracker's own state in its folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from whet.config import list_leaves
from whet.io.files import atomic_file
from whet.io.text import hide_passwords


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Name, folder and config of a run."""

    name: str
    folder: Path
    config: Mapping[str, JsonValue]

    def public_config(self) -> dict[str, JsonValue]:
        """The config without passwords in its URLs, for trackers that others may read."""
        return json.loads(hide_passwords(json.dumps(self.config)))

    def settings(self) -> dict[str, JsonValue]:
        """The public config as flat keys, such as `adam.lr`."""
        return dict(list_leaves(self.public_config()))


class TrackerState:
    """A few values that a tracker keeps between processes, in the run's folder."""

    def __init__(self, run: TrackedRun, name: str) -> None:
        self._file = run.folder / "tracking" / f"{name}.json"

    def read(self) -> dict[str, Any]:
        """The values that were written last. Any: the tracker's own."""
        return json.loads(self._file.read_text()) if self._file.exists() else {}

    def write(self, values: Mapping[str, JsonValue]) -> None:
        """Replace the values atomically."""
        self._file.parent.mkdir(exist_ok=True)
        with atomic_file(self._file) as partial:
            partial.write_text(json.dumps(values))
