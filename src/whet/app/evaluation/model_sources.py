"""Models as users name them: runs, checkpoints, adapters, folders, names, and endpoints."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from whet.app.run_folder import RunFolder
from whet.config import LocalTrainerConfig, PolicyConfig, RunConfig, TinkerConfig
from whet.errors import ConfigError
from whet.models.catalog import resolve_model

NAME_AND_SOURCE = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*)=(.+)", re.DOTALL)
WEIGHTS = (".safetensors", ".bin")
ADAPTER_KEYS = ("weights", "lora_rank", "lora_alpha", "lora_layers")
UNTRAINED_KEYS = ("use_rslora", "use_dora", "alpha_pattern")
"""Settings of PEFT by which an adapter is another than its rank and alpha say."""
PARTS, PART_BYTES = 64, 1 << 16


@dataclass(frozen=True, slots=True)
class LocalModel:
    """Weights on this machine: a model folder, with an adapter or a checkpoint on top."""

    name: str
    source: str
    """As the user wrote it."""
    folder: Path
    adapter: Path | None = None
    checkpoint: Path | None = None
    trainer: LocalTrainerConfig | None = None
    """Settings of the run that wrote the checkpoint."""
    seed: int = 0

    def fingerprint(self) -> str:
        """Digest of the weights, so that results of other weights are not mixed in."""
        digest = hashlib.blake2b(digest_size=16)
        for folder in (self.folder, self.adapter, self.checkpoint):
            for file in sorted(folder.iterdir()) if folder else []:
                if file.suffix in WEIGHTS:
                    _digest_file(file, digest)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class EndpointModel:
    """A model behind an OpenAI-compatible URL: text only, never trained."""

    name: str
    source: str
    """Its name at the endpoint."""
    url: str

    def fingerprint(self) -> str:
        return f"{self.source}@{self.url}"


@dataclass(frozen=True, slots=True)
class PolicySet:
    """The policies of a run of several, all of which are served together."""

    name: str
    source: str
    """As the user wrote it."""
    models: Mapping[str, LocalModel]
    """The model of each policy, by its name."""
    policies: Mapping[str, PolicyConfig]
    """Their sections in the run's config."""

    def fingerprint(self) -> str:
        """Digest of the weights of all policies."""
        found = {name: model.fingerprint() for name, model in self.models.items()}
        return hashlib.blake2b(json.dumps(found).encode(), digest_size=16).hexdigest()

    def choose(self, policy: str | None) -> LocalModel:
        """The model of one policy.

        Raises:
            ConfigError: no policy is named, or it is not one of these.
        """
        names = ", ".join(self.models)
        if policy is None:
            first = next(iter(self.models.values())).source
            raise ConfigError(
                f"{self.source!r} has several policies: name one of {names}, such as {first!r}"
            )
        if policy not in self.models:
            raise ConfigError(f"{self.source!r} has no policy {policy!r}: expected one of {names}")
        return self.models[policy]


Model = LocalModel | PolicySet | EndpointModel


def read_models(
    specs: Sequence[str],
    endpoint: str | None,
    progress: Callable[[str], None],
    *,
    directory: Path | None = None,
) -> list[Model]:
    """Resolve `--model [NAME=]SOURCE` flags; with an endpoint, sources are its model names.

    A source may be the name of a run in `directory`, as `whet runs` lists them. A run of several
    policies, or one of its checkpoints, gives the set of all policies.

    Raises:
        ConfigError: unknown model, or two models with one name.
    """
    models: list[Model] = []
    for spec in specs:
        named = NAME_AND_SOURCE.fullmatch(spec)
        name, source = named.groups() if named else (None, spec)
        if endpoint is None:
            models.append(_resolve_source(name, find_source(source, directory), progress))
        else:
            models.append(EndpointModel(name or _as_name(source), source, endpoint))
    for number, model in enumerate(models):
        if model.name in [other.name for other in models[:number]]:
            found = f"found two models called {model.name!r}: name them, such as"
            raise ConfigError.phrase(
                python=f"{found} models={{'base': 'tiny', 'trained': '.whet/runs/mine'}}",
                command=f"{found} --model base=tiny --model trained=.whet/runs/mine",
            )
    return models


def resolve_starts(
    values: Mapping[str, JsonValue], config: RunConfig, progress: Callable[[str], None]
) -> dict[str, JsonValue]:
    """Resolve the model of a run, and that of each of its policies, by `resolve_start`.

    Raises:
        ConfigError: as `resolve_start`.
    """
    resolved = dict(values)
    if "model" in values and config.model != RunConfig().model:
        resolved = resolve_start(values, config, progress)
    if config.policies:
        sections: dict[str, JsonValue] = {}
        for name, policy in config.policies.items():
            own: Mapping[str, JsonValue] = policy.model_dump(mode="json", exclude_defaults=True)
            if policy.model is not None and policy.initial_weights is None:
                own = resolve_start(own, config.for_policy(name), progress)
            sections[name] = dict(own)
        resolved["policies"] = sections
    return resolved


def resolve_start(
    values: Mapping[str, JsonValue], config: RunConfig, progress: Callable[[str], None]
) -> dict[str, JsonValue]:
    """Resolve a `model` that names a run, a checkpoint or an adapter; other models are unchanged.

    In the returned config values `model` is its base model, `initial_weights` the folder of its
    weights, and the trainer's settings of adapters are those that its adapters have.

    Raises:
        ConfigError: training cannot start from it, or the values ask for other adapters.
    """
    source = find_source(config.model, config.dir)
    if not _is_start(source):
        return dict(values)
    found = _resolve_model(None, source, progress)
    start = found.adapter or found.checkpoint
    if start is None:
        return {**values, "model": str(found.folder.absolute())}
    run = find_run_folder(start)
    base = _read_config(start, run).model if run else _find_base_model(start, None)
    shape = _read_shape(start, found.trainer or _read_trainer(start, run))
    requested = values.get("trainer", {})
    assert isinstance(requested, dict)
    for key, value in shape.items():
        if requested.get(key, value) != value:
            raise ConfigError(
                f"{source!r} has trainer.{key} {value!r}, found {requested[key]!r}: leave it out, "
                "or merge it into its base model and start from that folder"
            )
    trainer: dict[str, JsonValue] = {**requested, **shape}
    weights = str(start.absolute())
    return {**values, "model": base, "initial_weights": weights, "trainer": trainer}


def find_source(source: str, directory: Path | None) -> str:
    """Return the folder of a run that is given by name, and any other source unchanged."""
    if directory is None or _is_start(source):
        return source
    named = str(directory / "runs" / source)
    return named if _is_start(named) else source


def _is_start(source: str) -> bool:
    """Whether a model is a run, a checkpoint or an adapter."""
    path = Path(source).expanduser()
    run = find_run_folder(path)
    return (path / "adapter_config.json").is_file() or (
        run is not None and (path == run.path or _is_checkpoint(path, run))
    )


def _is_checkpoint(path: Path, run: RunFolder) -> bool:
    """Whether a folder is a checkpoint of a run, or that of one of several policies."""
    whole = path.parent if path.name in run.read_config().policies else path
    return whole.parent == run.checkpoints


def _explain_several(path: Path, run: RunFolder) -> ConfigError:
    names = run.read_config().trained_policies
    return ConfigError(
        f"{str(path)!r} has several policies: name one of them, such as {str(path / names[0])!r}"
    )


def _resolve_source(
    name: str | None, source: str, progress: Callable[[str], None]
) -> LocalModel | PolicySet:
    """Resolve a model, or all policies of a run that has several, or of one of its checkpoints."""
    path = Path(source).expanduser()
    run = find_run_folder(path)
    if run is None or not _has_several(path, run):
        return _resolve_model(name, source, progress)
    several, folder = run.read_config().policies, path
    if path == run.path:  # the trained policies, or those of the newest checkpoint while it runs
        folder = run.model if run.model.is_dir() else _find_newest_checkpoint(source, run)
    models: dict[str, LocalModel] = {}
    for policy, section in several.items():
        own = run.read_config().for_policy(policy)
        weights = str(own.initial_weights or own.model) if section.frozen else str(folder / policy)
        models[policy] = _resolve_model(policy, weights, progress)
    step = "" if folder == run.model or path == run.path else f"-{folder.name}"
    return PolicySet(name or run.path.name + step, source, models, several)


def _has_several(path: Path, run: RunFolder) -> bool:
    """Whether a folder has all the policies of a run of several."""
    folders = (run.path, run.model, *_list_checkpoints(run))
    return bool(run.read_config().policies) and path in folders


def _find_newest_checkpoint(source: str, run: RunFolder) -> Path:
    if checkpoints := _list_checkpoints(run):
        return checkpoints[-1]
    raise ConfigError(f"run {source!r} has no model and no checkpoint yet: let it finish a step")


def _list_checkpoints(run: RunFolder) -> list[Path]:
    return sorted(path for path in run.checkpoints.glob("*") if path.name[0] != ".")


def _read_trainer(path: Path, run: RunFolder | None) -> LocalTrainerConfig | None:
    trainer = _read_config(path, run).trainer if run else None
    return trainer if isinstance(trainer, LocalTrainerConfig) else None


def _read_config(path: Path, run: RunFolder) -> RunConfig:
    """Return the config of a model or checkpoint of a run, or of its policy if it has one."""
    config = run.read_config()
    return config.for_policy(path.name) if path.name in config.policies else config


def _read_shape(start: Path, trainer: LocalTrainerConfig | None) -> dict[str, JsonValue]:
    """Return the trainer's settings that adapters have, from their run or adapter_config.json."""
    if trainer is not None:
        keys = ("weights",) if trainer.weights == "full" else ADAPTER_KEYS
        return {key: trainer.model_dump(mode="json")[key] for key in keys}
    settings = json.loads((start / "adapter_config.json").read_text())
    for key in UNTRAINED_KEYS:
        if settings.get(key):
            raise ConfigError(
                f"the adapter {str(start)!r} has {key}, which is not trained here: merge it into "
                "its base model and start from that folder"
            )
    return {"lora_rank": settings["r"], "lora_alpha": settings["lora_alpha"]}


def _resolve_model(name: str | None, source: str, progress: Callable[[str], None]) -> LocalModel:
    path = Path(source).expanduser()
    run = find_run_folder(path)
    if run is not None and _has_several(path, run):
        raise _explain_several(run.model if path == run.path else path, run)
    if run is not None and path == run.path:
        return _resolve_run(name, source, run, progress)
    if (path / "adapter_config.json").is_file():
        folder = resolve_model(_find_base_model(path, run), progress=progress)
        return LocalModel(name or _choose_name(path, run), source, folder, adapter=path)
    if run is not None and _is_checkpoint(path, run):
        return _resolve_checkpoint(name, source, path, run, progress)
    return LocalModel(
        name or _choose_name(path, run), source, resolve_model(source, progress=progress)
    )


def _resolve_run(
    name: str | None, source: str, run: RunFolder, progress: Callable[[str], None]
) -> LocalModel:
    """Resolve the trained model of a run, or its newest checkpoint while it runs."""
    if run.model.is_dir():
        found = _resolve_model(name or run.path.name, str(run.model), progress)
        return LocalModel(found.name, source, found.folder, found.adapter)
    newest = _find_newest_checkpoint(source, run)
    return _resolve_checkpoint(name or run.path.name, source, newest, run, progress)


def _resolve_checkpoint(
    name: str | None, source: str, path: Path, run: RunFolder, progress: Callable[[str], None]
) -> LocalModel:
    config = _read_config(path, run)
    if isinstance(config.trainer, TinkerConfig):
        raise ConfigError(
            f"the weights of {source!r} are at a Tinker service: export them there, and name the "
            "folder"
        )
    if not isinstance(config.trainer, LocalTrainerConfig):
        raise ConfigError(
            f"the weights of {source!r} are a checkpoint of {config.trainer.kind}: convert them to "
            "a Hugging Face folder, and name that"
        )
    return LocalModel(
        name or f"{run.path.name}-{path.name}",
        source,
        resolve_model(config.model, progress=progress),
        checkpoint=path,
        trainer=config.trainer,
        seed=config.seed,
    )


def find_run_folder(path: Path) -> RunFolder | None:
    """Return the run that a folder belongs to."""
    for folder in (path, *path.parents[:3]):  # of one policy: RUN/checkpoints/STEP/POLICY
        if (folder / "kind").is_file() and (folder / "config.json").is_file():
            return RunFolder(folder)
    return None


def _find_base_model(adapter: Path, run: RunFolder | None) -> str:
    """The base model of an adapter: that of its run, else of its adapter_config.json."""
    if run is not None:
        return _read_config(adapter, run).model
    try:
        base = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"adapter {str(adapter)!r} has no base_model_name_or_path in its adapter_config.json: "
            "add the folder or the name of its base model"
        ) from error
    return str(base)


def _choose_name(path: Path, run: RunFolder | None) -> str:
    return run.path.name if run is not None and path == run.model else _as_name(path.name)


def _as_name(source: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", source).strip("-._") or "model"


def _digest_file(file: Path, digest: "hashlib.blake2b") -> None:
    """Digest a small file whole, and evenly spread parts of a large one: training changes all."""
    size = file.stat().st_size
    digest.update(f"{file.name} {size} ".encode())
    with file.open("rb") as opened:
        for number in range(PARTS):
            opened.seek(
                number * size // PARTS if size > PARTS * PART_BYTES else number * PART_BYTES
            )
            digest.update(opened.read(PART_BYTES))
