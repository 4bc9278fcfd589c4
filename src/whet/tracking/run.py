"""What a tracker is told of the run it tracks."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run, by name, with its folder and its config."""

    name: str
    folder: Path
    config: Mapping[str, JsonValue]

    def settings(self) -> dict[str, JsonValue]:
        """The config without sections: `adam.lr` and its like."""
        return dict(_leaves(self.config))


class Note:
    """A few values a tracker remembers between processes, in the run's folder."""

    def __init__(self, run: TrackedRun, name: str) -> None:
        self._file = run.folder / "tracking" / f"{name}.json"

    def read(self) -> dict[str, Any]:
        """Any: what it wrote itself."""
        return json.loads(self._file.read_text()) if self._file.exists() else {}

    def write(self, values: Mapping[str, JsonValue]) -> None:
        """Replace what is there, whole or not at all."""
        self._file.parent.mkdir(exist_ok=True)
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(values))
        partial.replace(self._file)


def _leaves(values: Mapping[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
