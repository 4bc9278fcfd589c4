"""Model names and their folders: shipped, converted, local, or of the Hugging Face Hub.

Imports nothing heavy: a command that only lists models must be fast.
"""

import difflib
import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, cast

from whet.errors import ConfigError, MissingExtra, boundary

logger = logging.getLogger(__name__)

TINY = Path(__file__).parent.parent / "demos" / "tiny"
"""Shipped in the package."""
SMOLLM2 = "smollm2-135m-instruct"
"""Name of its folder in the cache."""
SMOLLM2_MB = 542
EXPECTED = (
    "expected 'tiny', 'smollm2', a run that `whet runs` lists, a folder with a config.json as "
    "`save_pretrained` writes, a GGUF file, or a name of the Hugging Face Hub like "
    "'Qwen/Qwen3-0.6B'"
)
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
HUB_FILES = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.txt")
"""Files of a repository that are downloaded."""
HUB_COPIES = "*consolidated*.safetensors"
"""A second copy of the weights, for Mistral's own library."""


class ModelInfo(NamedTuple):
    """A line of `whet models`."""

    name: str
    summary: str
    size_mb: int
    path: Path | None
    """None if the model is not on this machine yet."""


def resolve_model(
    name: str,
    *,
    cache: Path | None = None,
    wheel: Path | None = None,
    progress: Callable[[str], None] = logger.info,
) -> Path:
    """Return the folder of a model; `smollm2` and Hub models are fetched the first time, and
    GGUF files converted.

    `tiny` and `smollm2` win over a folder of that name, which is `./tiny`. `wheel` is the file
    smollm2 is made from when there is no network.

    Raises:
        ConfigError: the model is unknown or cannot be fetched; the message says what to type.
    """
    if wheel is not None and name != "smollm2":
        raise ConfigError(f"only 'smollm2' is made from a wheel, not {name!r}: leave out the wheel")
    match name:
        case "tiny":
            return find_shipped_folder(TINY)
        case "smollm2":
            return _find_smollm2(find_models_dir(cache) / SMOLLM2, wheel, progress)
        case _ if _is_gguf(name):
            return _convert_gguf(Path(os.path.expanduser(name)), cache, progress)
        case _:
            return _find_folder(name, progress)


def find_model(name: str) -> Path | None:
    """Return the folder of a model that is on this machine, or None; nothing is fetched."""
    match name:
        case "tiny":
            return find_shipped_folder(TINY)
        case "smollm2":
            folder = find_models_dir() / SMOLLM2
        case _ if _is_gguf(name):
            folder = _find_gguf_folder(Path(os.path.expanduser(name)), None)
        case _:
            folder = Path(os.path.expanduser(name))
            if HUB_ID.fullmatch(name) and not os.path.lexists(folder):
                return _find_cached(name)
    return folder if _is_model(folder) else None


def _find_cached(name: str) -> Path | None:
    """Return a Hub model's folder if it was downloaded before."""
    try:
        import huggingface_hub  # noqa: PLC0415 - only for Hub models
    except ImportError:
        return None
    with suppress(ConfigError), boundary(ConfigError, "not in the cache"):
        download = cast(Callable[..., str], huggingface_hub.snapshot_download)
        return Path(download(name, local_files_only=True))
    return None


def list_models(*, cache: Path | None = None) -> list[ModelInfo]:
    """The named models, present or not."""
    smollm2 = find_models_dir(cache) / SMOLLM2
    return [
        _describe_folder("tiny", "a toy for tests and the first run, shipped with whet", TINY, 0),
        _describe_folder("smollm2", "SmolLM2-135M-Instruct by Hugging Face", smollm2, SMOLLM2_MB),
    ]


def read_model_context(folder: Path) -> int:
    """Read a model's context length from its config. Raises ConfigError if it is missing."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return int((config.get("text_config") or config)["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the config.json in {str(folder)!r} has no max_position_embeddings: add the model's "
            "context length"
        ) from error


def find_models_dir(cache: Path | None = None) -> Path:
    """Folder of converted models: under `cache`, else WHET_CACHE, else the user's cache."""
    if cache is not None:
        return cache / "models"
    if chosen := os.environ.get("WHET_CACHE"):
        return Path(chosen).expanduser().absolute() / "models"
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says to ignore a path that is not absolute.
    return (caches if caches.is_absolute() else Path.home() / ".cache") / "whet" / "models"


def find_shipped_folder(folder: Path) -> Path:
    """Return a folder shipped in the package. Raises ConfigError if it is missing."""
    if not _is_model(folder):
        raise ConfigError(
            f"the model {folder.name!r} is missing from this installation, "
            f"expected it in {str(folder)!r}: install whet again"
        )
    return folder


def _find_smollm2(folder: Path, wheel: Path | None, progress: Callable[[str], None]) -> Path:
    if _is_model(folder):
        return folder
    # Checked again: another process may have just put the model there.
    if os.path.lexists(folder) and not _is_model(folder):
        raise ConfigError(
            f"{str(folder)!r} is in the way of the model and has no config.json: remove it"
        )
    try:
        from whet.models import smollm2  # noqa: PLC0415 - imports numpy
    except ImportError as error:
        raise MissingExtra.build("converting smollm2", "local") from error
    smollm2.make_folder(folder, wheel=wheel, progress=progress)
    return folder


def _is_gguf(name: str) -> bool:
    return name.endswith(".gguf") and os.path.isfile(os.path.expanduser(name))


def _find_gguf_folder(file: Path, cache: Path | None) -> Path:
    """Folder of the converted file in the cache; another one after the file has changed."""
    found = file.stat()
    identity = f"{file.resolve()}\n{found.st_size}\n{found.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return find_models_dir(cache) / f"{file.stem}-{digest}"


def _convert_gguf(file: Path, cache: Path | None, progress: Callable[[str], None]) -> Path:
    folder = _find_gguf_folder(file, cache)
    if not _is_model(folder):
        try:
            from whet.models import gguf_model  # noqa: PLC0415 - imports torch
        except ImportError as error:
            raise MissingExtra.build("converting a GGUF file", "local") from error
        gguf_model.make_folder(file, folder, progress=progress)
    return folder


def _find_folder(name: str, progress: Callable[[str], None]) -> Path:
    folder = Path(os.path.expanduser(name))
    if name and _is_model(folder):
        return folder
    if HUB_ID.fullmatch(name) and not os.path.lexists(folder):
        return _download(name, progress)
    raise ConfigError(_explain(name, folder))


def _download(name: str, progress: Callable[[str], None]) -> Path:
    """Return a Hub model's folder in Hugging Face's cache; downloads what is missing or newer."""
    try:
        import huggingface_hub  # noqa: PLC0415 - only for Hub models
    except ImportError as error:
        raise MissingExtra.build("downloading a model", "local") from error
    progress(f"looking up {name} on the Hugging Face Hub")
    with boundary(
        ConfigError,
        f"there is no folder {name!r}, and it cannot be downloaded from the Hugging Face Hub "
        "(check the name, the network and HF_TOKEN, or copy the model and pass its folder)",
    ):
        download = cast(Callable[..., str], huggingface_hub.snapshot_download)
        try:
            files = {"allow_patterns": list(HUB_FILES), "ignore_patterns": HUB_COPIES}
            folder = Path(download(name, **files))
        except huggingface_hub.errors.GatedRepoError as error:
            raise ConfigError(
                f"{name!r} asks for your agreement: accept its terms at "
                f"{huggingface_hub.constants.ENDPOINT}/{name}, then set HF_TOKEN to a token of "
                "your account"
            ) from error
        except huggingface_hub.errors.RepositoryNotFoundError as error:
            raise ConfigError(
                f"the Hugging Face Hub has no model {name!r} that you may read: check the name; "
                "for a private one set HF_TOKEN"
            ) from error
        except huggingface_hub.errors.LocalEntryNotFoundError as error:
            raise ConfigError(
                f"there is no folder {name!r}, and it cannot be downloaded from the Hugging Face "
                f"Hub: cannot reach the Hugging Face Hub at {huggingface_hub.constants.ENDPOINT}, "
                "or HF_HUB_OFFLINE is set, and the model is not in its cache; copy the model and "
                "pass its folder"
            ) from error
    if not _is_model(folder):
        raise ConfigError(
            f"{name!r} on the Hugging Face Hub is not a model: {_describe_contents(folder)}"
        )
    return folder


def _explain(name: str, folder: Path) -> str:
    if re.match(r"https?://", name):
        return (
            f"{name!r} is an endpoint, which answers with text and cannot be trained; {EXPECTED}; "
            "agents reach endpoints by gateway.endpoints, and `whet eval` compares them"
        )
    if name and os.path.isdir(folder):
        return f"the folder {name!r} is not a model: {_describe_contents(folder)}; {EXPECTED}"
    if name and os.path.lexists(folder):
        return f"{name!r} is not a folder; {EXPECTED}"
    if close := difflib.get_close_matches(name.lower(), ["tiny", "smollm2"], n=1, cutoff=0.6):
        return f"there is no model {name!r}: did you mean {close[0]!r}? {EXPECTED}"
    return f"there is no model {name!r}; {EXPECTED}"


def _describe_contents(folder: Path) -> str:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return f"it is not readable ({error.strerror})"
    if "config.json" in names:
        return "its config.json is not a readable file"
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"it has no config.json, but {shown}" if names else "it is empty"


def _is_model(folder: Path) -> bool:
    # Not Path.is_file, which raises where a name is too long or a parent is not readable.
    return os.path.isfile(folder / "config.json")


def _describe_folder(name: str, summary: str, folder: Path, size_mb: int) -> ModelInfo:
    if not _is_model(folder):
        return ModelInfo(name, summary, size_mb, None)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return ModelInfo(name, summary, math.ceil(size / 1_000_000), folder)
