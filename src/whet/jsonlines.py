"""A file of JSON lines that is only ever appended to, and survives a kill at any moment."""

import fcntl
import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from whet.errors import ConfigError


class JsonLines:
    """Whole lines, one JSON object each. Several processes may append to one file."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be opened or made."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._cut_torn_line()
        except OSError as error:
            raise ConfigError(f"cannot write to {str(path)!r}: {error.strerror}") from error

    def read(self) -> Iterator[dict[str, Any]]:
        """What is there. Any: it is read as it was written.

        Raises:
            ConfigError: a line that is no JSON object; it is nobody's to repair.
        """
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    value = json.loads(line)
                except ValueError:
                    value = None
                if not isinstance(value, dict):
                    raise ConfigError(
                        f"{str(self.path)!r} line {number} is no JSON object: mend or move the file"
                    )
                yield value

    def append(self, *values: Mapping[str, object]) -> None:
        """Add lines: all of them in one write."""
        text = "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
        with self._alone() as file:
            file.write(text.encode())

    def _cut_torn_line(self) -> None:
        """A line without its end is what a kill or a full disk left of one."""
        with self._alone() as file:
            file.seek(0)
            written = file.readall()
            whole = written.rfind(b"\n") + 1
            if whole < len(written):
                file.truncate(whole)

    @contextmanager
    def _alone(self) -> Generator[FileIO]:
        with self.path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
            yield file
