"""What `whet eval` compares: models on this machine by name or folder, and endpoints elsewhere."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from whet.app.folder import RunFolder
from whet.config import RunConfig
from whet.errors import ConfigError
from whet.policies.catalogue import resolve_model

NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*)=(.+)", re.DOTALL)
WEIGHTS = (".safetensors", ".bin")
CHUNKS, CHUNK = 64, 1 << 16


@dataclass(frozen=True, slots=True)
class LocalModel:
    """Weights on this machine: a model folder, with an adapter or a checkpoint on top of it."""

    name: str
    source: str
    """As the user wrote it."""
    folder: Path
    adapter: Path | None = None
    checkpoint: Path | None = None
    config: RunConfig | None = None
    """Of the run the checkpoint is of."""

    def fingerprint(self) -> str:
        """The same for the same weights: results of other weights must not be mixed in."""
        digest = hashlib.blake2b(digest_size=16)
        for folder in (self.folder, self.adapter, self.checkpoint):
            for file in sorted(folder.iterdir()) if folder else []:
                if file.suffix in WEIGHTS:
                    _digest_file(file, digest)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class EndpointModel:
    """A model behind an OpenAI-compatible URL: text only, and never trained."""

    name: str
    source: str
    """What the endpoint calls it."""
    url: str

    def fingerprint(self) -> str:
        return f"{self.source}@{self.url}"


Model = LocalModel | EndpointModel


def read_models(
    specs: Sequence[str], endpoint: str | None, progress: Callable[[str], None]
) -> list[Model]:
    """The models that `--model [NAME=]SOURCE` flags name; with an endpoint, those it has.

    Raises:
        ConfigError: there is no such model, or two have one name.
    """
    models: list[Model] = []
    for spec in specs:
        named = NAMED.fullmatch(spec)
        name, source = named.groups() if named else (None, spec)
        if endpoint is None:
            models.append(_find(name, source, progress))
        else:
            models.append(EndpointModel(name or _as_name(source), source, endpoint))
    for number, model in enumerate(models):
        if model.name in [other.name for other in models[:number]]:
            raise ConfigError(
                f"two models are called {model.name!r}: name them, such as "
                "--model base=tiny --model trained=.whet/runs/mine"
            )
    return models


def _find(name: str | None, source: str, progress: Callable[[str], None]) -> LocalModel:
    path = Path(source).expanduser()
    run = _run_of(path)
    if run is not None and path == run.path:
        return _trained(name, source, run, progress)
    if (path / "adapter_config.json").is_file():
        folder = resolve_model(_base_of(path, run), progress=progress)
        return LocalModel(name or _name_of(path, run), source, folder, adapter=path)
    if run is not None and path.parent == run.checkpoints:
        return _at_checkpoint(name, source, path, run, progress)
    return LocalModel(name or _name_of(path, run), source, resolve_model(source, progress=progress))


def _trained(
    name: str | None, source: str, run: RunFolder, progress: Callable[[str], None]
) -> LocalModel:
    """What a run has come to: its model, or its newest checkpoint while it is at work."""
    if run.model.is_dir():
        found = _find(name or run.path.name, str(run.model), progress)
        return LocalModel(found.name, source, found.folder, found.adapter)
    checkpoints = sorted(path for path in run.checkpoints.glob("*") if path.name[0] != ".")
    if not checkpoints:
        raise ConfigError(f"the run {source!r} has trained nothing yet: no model, no checkpoint")
    return _at_checkpoint(name or run.path.name, source, checkpoints[-1], run, progress)


def _at_checkpoint(
    name: str | None, source: str, path: Path, run: RunFolder, progress: Callable[[str], None]
) -> LocalModel:
    config = run.config()
    folder = resolve_model(config.model, progress=progress)
    return LocalModel(
        name or f"{run.path.name}-{path.name}", source, folder, checkpoint=path, config=config
    )


def _run_of(path: Path) -> RunFolder | None:
    """The run that a folder is, or is a part of."""
    for place in (path, path.parent, path.parent.parent):
        if (place / "kind").is_file() and (place / "config.json").is_file():
            return RunFolder(place)
    return None


def _base_of(adapter: Path, run: RunFolder | None) -> str:
    """The model an adapter is for: what its run was started with, else what it says itself."""
    if run is not None:
        return run.config().model
    try:
        base = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the adapter {str(adapter)!r} does not say of which model") from error
    return str(base)


def _name_of(path: Path, run: RunFolder | None) -> str:
    return run.path.name if run is not None and path == run.model else _as_name(path.name)


def _as_name(source: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", source).strip("-._") or "model"


def _digest_file(file: Path, digest: "hashlib.blake2b") -> None:
    """Whole if it is small; of a large one parts from everywhere, for training changes all."""
    size = file.stat().st_size
    digest.update(f"{file.name} {size} ".encode())
    with file.open("rb") as opened:
        for number in range(CHUNKS):
            opened.seek(number * size // CHUNKS if size > CHUNKS * CHUNK else number * CHUNK)
            digest.update(opened.read(CHUNK))
