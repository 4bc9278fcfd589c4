"""The models whet knows by name, and where their folders are.

Imports nothing heavy: a command that only lists models must answer at once.
"""

import difflib
import json
import logging
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from whet.errors import ConfigError, MissingExtra

logger = logging.getLogger(__name__)

TINY = Path(__file__).parent.parent / "tiny"
"""Shipped in the package."""
SMOLLM2 = "smollm2-135m-instruct"
"""Its folder in the cache."""
SMOLLM2_MB = 542
EXPECTED = "expected 'tiny', 'smollm2' or a folder with a config.json, as `save_pretrained` writes"


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
    """The folder of a model; `smollm2` is fetched and converted the first time.

    A name of the catalogue wins over a folder of that name, which is `./tiny`. `wheel` is what
    smollm2 is made from when there is no network.

    Raises:
        ConfigError: there is no such model, or it cannot be made; the message says what to type.
    """
    if wheel is not None and name != "smollm2":
        raise ConfigError(f"only 'smollm2' is made from a wheel, not {name!r}: leave out the wheel")
    match name:
        case "tiny":
            return shipped(TINY)
        case "smollm2":
            return _smollm2(models_dir(cache) / SMOLLM2, wheel, progress)
        case _:
            return _folder(name)


def available(*, cache: Path | None = None) -> list[ModelInfo]:
    """The models that have a name, present or not."""
    smollm2 = models_dir(cache) / SMOLLM2
    return [
        _info("tiny", "a toy for tests and the first run, shipped with whet", TINY, 0),
        _info("smollm2", "SmolLM2-135M-Instruct by Hugging Face", smollm2, SMOLLM2_MB),
    ]


def model_context(folder: Path) -> int:
    """The most tokens a model was made for. Raises ConfigError if its config does not say."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return int((config.get("text_config") or config)["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the config.json in {str(folder)!r} has no max_position_embeddings"
        ) from error


def models_dir(cache: Path | None = None) -> Path:
    """Where converted models are kept: under `cache`, else WHET_CACHE, else the user's cache."""
    if cache is not None:
        return cache / "models"
    if chosen := os.environ.get("WHET_CACHE"):
        return Path(chosen).expanduser().absolute() / "models"
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says to ignore a path that is not absolute.
    return (caches if caches.is_absolute() else Path.home() / ".cache") / "whet" / "models"


def shipped(folder: Path) -> Path:
    """A folder that came with the package. Raises ConfigError if it did not."""
    if not _is_model(folder):
        raise ConfigError(
            f"the model {folder.name!r} is missing from this installation, "
            f"expected it in {str(folder)!r}: pip install --force-reinstall --no-deps whet"
        )
    return folder


def _smollm2(folder: Path, wheel: Path | None, progress: Callable[[str], None]) -> Path:
    if _is_model(folder):
        return folder
    # Looked at again: another process may have put the model there just now.
    if os.path.lexists(folder) and not _is_model(folder):
        raise ConfigError(
            f"{str(folder)!r} is in the way of the model, and not one (no config.json): remove it"
        )
    try:
        from whet.policies import smollm2  # noqa: PLC0415 - numpy, and only when a model is made
    except ImportError as error:
        raise MissingExtra.of("converting smollm2", "local") from error
    smollm2.make(folder, wheel=wheel, progress=progress)
    return folder


def _folder(name: str) -> Path:
    folder = Path(os.path.expanduser(name))
    if name and _is_model(folder):
        return folder
    raise ConfigError(_why_not(name, folder))


def _why_not(name: str, folder: Path) -> str:
    if re.match(r"https?://", name):
        return (
            f"{name!r} is an endpoint, which answers with text and cannot be trained; {EXPECTED}; "
            "agents reach endpoints by gateway.endpoints, and `whet eval` compares them"
        )
    if name and os.path.isdir(folder):
        return f"the folder {name!r} is not a model: {_contents(folder)}; {EXPECTED}"
    if name and os.path.lexists(folder):
        return f"{name!r} is not a folder; {EXPECTED}"
    if close := difflib.get_close_matches(name.lower(), ["tiny", "smollm2"], n=1, cutoff=0.6):
        return f"there is no model {name!r}: did you mean {close[0]!r}? {EXPECTED}"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        hint = f"if it is on the Hugging Face Hub, `hf download {name} --local-dir DIR`, then DIR"
        return f"there is no folder {name!r}; {EXPECTED}; {hint}"
    return f"there is no model {name!r}; {EXPECTED}"


def _contents(folder: Path) -> str:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    if "config.json" in names:
        return "its config.json is not a file that can be read"
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"it has no config.json, but {shown}" if names else "it is empty"


def _is_model(folder: Path) -> bool:
    # Not Path.is_file, which raises where a name is too long or a parent may not be read.
    return os.path.isfile(folder / "config.json")


def _info(name: str, summary: str, folder: Path, size_mb: int) -> ModelInfo:
    if not _is_model(folder):
        return ModelInfo(name, summary, size_mb, None)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return ModelInfo(name, summary, math.ceil(size / 1_000_000), folder)
