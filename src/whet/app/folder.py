"""A run's folder: where everything of a run lives, owned by one process at a time."""

import fcntl
import json
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from pydantic import ValidationError

from whet.config import RunConfig, explain
from whet.errors import ConfigError


class RunFolder:
    """`<dir>/runs/<name>/`: config, store, checkpoints, the trained model, the report."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.store = path / "store.db"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.picture = path / "curve.png"
        self.report = path / "report.json"
        self._secret = path / "gateway.key"

    @classmethod
    def create(cls, config: RunConfig, kind: str) -> "RunFolder":
        """A new run's folder with its resolved config. Raises ConfigError if it cannot be made."""
        name = config.name or f"{kind}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        folder = cls(config.dir / "runs" / name)
        if folder.config_file.exists():
            raise ConfigError(
                f"the run {name!r} exists already: continue it with --resume, or choose "
                "another --name"
            )
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.checkpoints.mkdir(exist_ok=True)
            folder._write_secret()
            partial = folder.config_file.with_suffix(".partial")
            partial.write_text(config.model_dump_json(indent=2))
            os.replace(partial, folder.config_file)
        except OSError as error:
            raise ConfigError(
                f"cannot write to {str(folder.path)!r}: {error.strerror}; choose another --dir"
            ) from error
        return folder

    @classmethod
    def latest(cls, directory: Path, kind: str) -> "RunFolder":
        """The newest run of a kind. Raises ConfigError if there is none."""
        runs = sorted(
            (directory / "runs").glob(f"{kind}-*/config.json"), key=lambda p: p.stat().st_mtime
        )
        if not runs:
            raise ConfigError(
                f"there is no run to resume in {str(directory / 'runs')!r}: start one without "
                "--resume"
            )
        return cls(runs[-1].parent)

    def config(self) -> RunConfig:
        """The config the run was started with."""
        try:
            return RunConfig.model_validate_json(self.config_file.read_text())
        except OSError as error:
            raise ConfigError(
                f"{str(self.path)!r} is not a run: it has no config.json"
            ) from error
        except ValidationError as error:
            raise ConfigError(f"{str(self.config_file)!r}: {explain(error)}") from error

    def secret(self) -> bytes:
        """What this run's API keys are minted with; the same after a restart."""
        return self._secret.read_bytes()

    @contextmanager
    def owned(self) -> Generator[None]:
        """Hold the run, so that no other process works on it. A kill lets it go."""
        with (self.path / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"the run {self.path.name!r} is being worked on by another process"
                ) from error
            yield

    def write_report(self, report: dict[str, object]) -> None:
        """Save the final numbers."""
        self.report.write_text(json.dumps(report, indent=2))

    def _write_secret(self) -> None:
        if not self._secret.exists():
            handle = os.open(self._secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_bytes(32))
