"""Storage of sessions, training runs, checkpoints and samplers as JSON files.

sessions/<session>.json
samplers/<sampler>.json
runs/<run>/run.json
runs/<run>/<weights | sampler_weights | external_weights>/<name>/checkpoint.json
"""

import os
import re
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import JsonValue

from whet.app.tinker_server.backend import Lora
from whet.errors import NotFound, RequestError
from whet.io.files import PARTIAL, atomic_file, atomic_folder
from whet.types import Value

V = TypeVar("V", bound=Value)

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: dict[str, str] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
"""Client name of each kind of checkpoint, by its name in paths."""
SCHEME = "tinker://"
METADATA_FILE = "checkpoint.json"
"""Metadata file in a checkpoint's folder."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,199}")


class Session(Value):
    """One client process."""

    id: str
    created: float
    metadata: dict[str, JsonValue] | None = None
    display_name: str | None = None
    finished: bool = False


class TrainingRun(Value):
    """A training run."""

    id: str
    session: str
    created: float
    base_model: str
    lora: Lora
    metadata: dict[str, JsonValue] | None = None


class Checkpoint(Value):
    """A checkpoint of a run."""

    run: str
    kind: CheckpointKind
    name: str
    created: float
    base_model: str
    lora: Lora
    expires: float | None = None
    public: bool = False
    ephemeral: bool = False
    """Unnamed sampler weights: not listed, deleted with the session."""
    metadata: dict[str, str] | None = None

    @property
    def path(self) -> str:
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"


class SamplingSession(Value):
    """A sampling client's weights: the base model or a checkpoint."""

    id: str
    session: str
    base_model: str
    model_path: str | None


class Storage:
    """Reads and writes the files under a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("sessions", "samplers", "runs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._drop_unfinished()

    # ----------------------------------------------------------------- sessions and samplers

    def read_session(self, id: str) -> Session:
        """Return a session. Raises NotFound."""
        return _read(self._find_session(id), Session, "session")

    def _find_session(self, id: str) -> Path:
        return self._folder / "sessions" / f"{_check_name(id)}.json"

    def list_sessions(self) -> list[Session]:
        """List all, newest first."""
        found = [_read(f, Session, "session") for f in (self._folder / "sessions").glob("*.json")]
        return sorted(found, key=lambda session: -session.created)

    def save_session(self, session: Session) -> None:
        _write(self._find_session(session.id), session)

    def mark_alive(self, session: str) -> None:
        """Keep the time of a session's last request, as that of its file's last change."""
        os.utime(self._find_session(session))

    def delete_old_sessions(self, before: float) -> None:
        """Delete sessions without a request since a time, unless checkpoints are left of them."""
        sessions = (self._folder / "sessions").glob("*.json")
        silent = {file.stem for file in sessions if file.stat().st_mtime < before}
        if not silent:
            return
        checkpoints = self._folder.glob(f"runs/*/*/*/{METADATA_FILE}")
        silent -= {file.parents[2].name.partition(":")[0] for file in checkpoints}
        for session in silent:
            for run in self._folder.glob(f"runs/{session}:*"):
                shutil.rmtree(run, ignore_errors=True)
            for sampler in self._folder.glob(f"samplers/{session}:*.json"):
                sampler.unlink(missing_ok=True)
            self._find_session(session).unlink(missing_ok=True)

    def read_sampler(self, id: str) -> SamplingSession:
        """Return a sampler. Raises NotFound."""
        return _read(
            self._folder / "samplers" / f"{_check_name(id)}.json", SamplingSession, "sampler"
        )

    def list_samplers(self, session: str) -> list[SamplingSession]:
        files = (self._folder / "samplers").glob(f"{_check_name(session)}:*.json")
        return [_read(file, SamplingSession, "sampler") for file in sorted(files)]

    def save_sampler(self, sampler: SamplingSession) -> None:
        _write(self._folder / "samplers" / f"{sampler.id}.json", sampler)

    # ----------------------------------------------------------------- runs

    def read_run(self, id: str) -> TrainingRun:
        """Return a run. Raises NotFound."""
        return _read(
            self._folder / "runs" / _check_name(id) / "run.json", TrainingRun, "training run"
        )

    def list_runs(self) -> list[TrainingRun]:
        """List all, newest first."""
        found = [
            _read(f, TrainingRun, "training run") for f in self._folder.glob("runs/*/run.json")
        ]
        return sorted(found, key=lambda run: -run.created)

    def save_run(self, run: TrainingRun) -> None:
        folder = self._folder / "runs" / run.id
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "run.json", run)

    # ----------------------------------------------------------------- checkpoints

    def find_folder(self, path: str) -> Path:
        """Return the folder of a checkpoint path. Raises RequestError if the path is invalid."""
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS:
            raise RequestError(
                f"invalid checkpoint path {path!r}: expected tinker://RUN/weights/NAME"
            )
        return self._folder / "runs" / _check_name(parts[0]) / parts[1] / _check_name(parts[2])

    def read_checkpoint(self, path: str) -> Checkpoint:
        """Return a checkpoint. Raises NotFound if it does not exist or has expired."""
        found = _read(self.find_folder(path) / METADATA_FILE, Checkpoint, "checkpoint", path)
        if found.expires is not None and found.expires < time.time():
            raise NotFound(f"the checkpoint {path!r} has expired")
        return found

    def has_checkpoint(self, path: str) -> bool:
        """Return whether a checkpoint exists that has not expired."""
        try:
            self.read_checkpoint(path)
        except NotFound:
            return False
        return True

    def list_checkpoints(self, run: str | None = None) -> list[Checkpoint]:
        """List named checkpoints, newest first; expired ones are deleted."""
        pattern = f"runs/{_check_name(run) if run else '*'}/*/*/checkpoint.json"
        found: list[Checkpoint] = []
        for file in self._folder.glob(pattern):
            if file.parent.name.startswith("."):  # still being written
                continue
            one = _read(file, Checkpoint, "checkpoint")
            if one.expires is not None and one.expires < time.time():
                shutil.rmtree(file.parent, ignore_errors=True)
            elif not one.ephemeral:
                found.append(one)
        return sorted(found, key=lambda checkpoint: -checkpoint.created)

    def measure(self, path: str) -> int:
        """Return the size of a checkpoint in bytes."""
        return sum(
            file.stat().st_size for file in self.find_folder(path).rglob("*") if file.is_file()
        )

    @contextmanager
    def write(self, checkpoint: Checkpoint) -> Generator[Path]:
        """Yield an empty folder to write a checkpoint to; it appears atomically."""
        with atomic_folder(self.find_folder(checkpoint.path)) as folder:
            yield folder
            (folder / METADATA_FILE).write_text(checkpoint.model_dump_json())

    def change(self, checkpoint: Checkpoint) -> None:
        """Rewrite the metadata of a checkpoint."""
        _write(self.find_folder(checkpoint.path) / METADATA_FILE, checkpoint)

    def delete(self, path: str) -> None:
        """Delete a checkpoint. Raises NotFound."""
        self.read_checkpoint(path)
        shutil.rmtree(self.find_folder(path), ignore_errors=True)

    def list_unnamed(self, run: str) -> list[Checkpoint]:
        """List the unnamed checkpoints of a run, newest first."""
        return self._find_unnamed(run)

    def list_unnamed_in_session(self, session: str) -> list[Checkpoint]:
        """List the unnamed checkpoints of a session's runs."""
        return self._find_unnamed(f"{session}:*")  # with which the ids of its runs begin

    def _find_unnamed(self, runs: str) -> list[Checkpoint]:
        files = self._folder.glob(f"runs/{runs}/sampler_weights/*/{METADATA_FILE}")
        found = [_read(file, Checkpoint, "checkpoint") for file in files]
        return sorted((one for one in found if one.ephemeral), key=lambda one: -one.created)

    def delete_unnamed(self, saved: Checkpoint) -> None:
        """Delete an unnamed checkpoint with its samplers."""
        for sampler in self.list_samplers(self.read_run(saved.run).session):
            if sampler.model_path == saved.path:
                (self._folder / "samplers" / f"{sampler.id}.json").unlink(missing_ok=True)
        shutil.rmtree(self.find_folder(saved.path), ignore_errors=True)

    def _drop_unfinished(self) -> None:
        for folder in self._folder.glob(f"runs/*/*/{PARTIAL.format('*')}"):
            shutil.rmtree(folder, ignore_errors=True)


def _check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise RequestError(f"invalid name {name!r:.80}: expected letters, digits and _ . : -")
    return name


def _read(file: Path, kind: type[V], what: str, name: str | None = None) -> V:
    try:
        return kind.model_validate_json(file.read_bytes())
    except FileNotFoundError as error:
        raise NotFound(f"unknown {what} {name or file.stem!r}") from error


def _write(file: Path, value: Value) -> None:
    with atomic_file(file) as partial:
        partial.write_text(value.model_dump_json())
