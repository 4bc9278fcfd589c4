"""What outlives the server: sessions, training runs, checkpoints and samplers, as JSON files.

sessions/<session>.json
samplers/<sampler>.json
runs/<run>/run.json
runs/<run>/<weights | sampler_weights | external_weights>/<name>/checkpoint.json
"""

import re
import shutil
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import JsonValue

from whet.durable import PARTIAL, whole_file, whole_folder
from whet.errors import NotFound, RequestError
from whet.tinker_server.workshop import Lora
from whet.types import Value

V = TypeVar("V", bound=Value)

Kind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: dict[str, str] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
"""As paths name them, and as the client does."""
SCHEME = "tinker://"
SAID = "checkpoint.json"
"""What is said of a checkpoint, among its files."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,199}")


class Session(Value):
    """One client process."""

    id: str
    created: float
    metadata: dict[str, JsonValue] | None = None
    display_name: str | None = None
    finished: bool = False


class Run(Value):
    """Adapters that are or were trained."""

    id: str
    session: str
    created: float
    base_model: str
    lora: Lora
    metadata: dict[str, JsonValue] | None = None


class Checkpoint(Value):
    """What was saved of a run."""

    run: str
    kind: Kind
    name: str
    created: float
    base_model: str
    lora: Lora
    expires: float | None = None
    public: bool = False
    ephemeral: bool = False
    """Of a sampler without a name: not listed, and gone with its session."""
    metadata: dict[str, str] | None = None

    @property
    def path(self) -> str:
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"


class Sampler(Value):
    """What a sampling client samples from: the base model, or a checkpoint."""

    id: str
    session: str
    base_model: str
    model_path: str | None


class Records:
    """The files under a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("sessions", "samplers", "runs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._drop_unfinished()

    # ----------------------------------------------------------------- sessions and samplers

    def session(self, id: str) -> Session:
        """One session. Raises NotFound."""
        return _read(self._folder / "sessions" / f"{_safe(id)}.json", Session, "session")

    def sessions(self) -> list[Session]:
        """All of them, the newest first."""
        found = [_read(f, Session, "session") for f in (self._folder / "sessions").glob("*.json")]
        return sorted(found, key=lambda session: -session.created)

    def keep_session(self, session: Session) -> None:
        _write(self._folder / "sessions" / f"{session.id}.json", session)

    def sampler(self, id: str) -> Sampler:
        """One sampler. Raises NotFound."""
        return _read(self._folder / "samplers" / f"{_safe(id)}.json", Sampler, "sampler")

    def samplers_of(self, session: str) -> list[Sampler]:
        files = (self._folder / "samplers").glob(f"{_safe(session)}:*.json")
        return [_read(file, Sampler, "sampler") for file in sorted(files)]

    def keep_sampler(self, sampler: Sampler) -> None:
        _write(self._folder / "samplers" / f"{sampler.id}.json", sampler)

    # ----------------------------------------------------------------- runs

    def run(self, id: str) -> Run:
        """One run. Raises NotFound."""
        return _read(self._folder / "runs" / _safe(id) / "run.json", Run, "training run")

    def runs(self) -> list[Run]:
        """All of them, the newest first."""
        found = [_read(f, Run, "training run") for f in self._folder.glob("runs/*/run.json")]
        return sorted(found, key=lambda run: -run.created)

    def keep_run(self, run: Run) -> None:
        folder = self._folder / "runs" / run.id
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "run.json", run)

    # ----------------------------------------------------------------- checkpoints

    def folder(self, path: str) -> Path:
        """Where the checkpoint of a path is or would be. Raises RequestError if it is no path."""
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS:
            raise RequestError(f"{path!r} is no checkpoint: expected tinker://RUN/weights/NAME")
        return self._folder / "runs" / _safe(parts[0]) / parts[1] / _safe(parts[2])

    def checkpoint(self, path: str) -> Checkpoint:
        """One checkpoint. Raises NotFound if there is none, or no longer."""
        found = _read(self.folder(path) / SAID, Checkpoint, "checkpoint", path)
        if found.expires is not None and found.expires < time.time():
            raise NotFound(f"the checkpoint {path!r} has expired")
        return found

    def checkpoints(self, run: str | None = None) -> list[Checkpoint]:
        """Those that were given a name, the newest first; what has expired is removed."""
        pattern = f"runs/{_safe(run) if run else '*'}/*/*/checkpoint.json"
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

    def size(self, path: str) -> int:
        """Bytes on disk."""
        return sum(file.stat().st_size for file in self.folder(path).rglob("*") if file.is_file())

    @contextmanager
    def keeping(self, checkpoint: Checkpoint) -> Generator[Path]:
        """An empty folder to write a checkpoint to, which is there whole from one moment on."""
        with whole_folder(self.folder(checkpoint.path)) as folder:
            yield folder
            (folder / SAID).write_text(checkpoint.model_dump_json())

    def change(self, checkpoint: Checkpoint) -> None:
        """Write what is said of a checkpoint anew."""
        _write(self.folder(checkpoint.path) / SAID, checkpoint)

    def delete(self, path: str) -> None:
        """Remove a checkpoint. Raises NotFound."""
        self.checkpoint(path)
        shutil.rmtree(self.folder(path), ignore_errors=True)

    def delete_ephemeral(self, session: str) -> None:
        """Remove what a session saved without a name."""
        for run in self.runs():
            if run.session == session:
                for folder in self._ephemeral(run.id):
                    shutil.rmtree(folder, ignore_errors=True)

    def _ephemeral(self, run: str) -> Iterator[Path]:
        for file in self._folder.glob(f"runs/{run}/sampler_weights/*/checkpoint.json"):
            if _read(file, Checkpoint, "checkpoint").ephemeral:
                yield file.parent

    def _drop_unfinished(self) -> None:
        for folder in self._folder.glob(f"runs/*/*/{PARTIAL.format('*')}"):
            shutil.rmtree(folder, ignore_errors=True)


def _safe(name: str) -> str:
    if not NAME.fullmatch(name):
        raise RequestError(f"{name!r:.80} is no name here: letters, digits and _ . : - make one")
    return name


def _read(file: Path, kind: type[V], what: str, name: str | None = None) -> V:
    try:
        return kind.model_validate_json(file.read_bytes())
    except FileNotFoundError as error:
        raise NotFound(f"there is no {what} {name or file.stem!r}") from error


def _write(file: Path, value: Value) -> None:
    with whole_file(file) as partial:
        partial.write_text(value.model_dump_json())
