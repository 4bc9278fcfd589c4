"""Saved prompts, read from a search or a file, as resources of a run."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import JsonValue

from whet.errors import ConfigError

BEST_FILE = "prompts.json"
"""The best prompts of a search, in its run's folder."""

NAME_AND_FILE = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*)=(.+)", re.DOTALL)

ALL_MODELS = ""
"""Name of prompts that are not for one model."""


def load_prompts(source: str | Path) -> dict[str, JsonValue]:
    """Read prompts as resources: of a run of `whet optimize-prompt`, or a JSON or text file.

    A text file is one prompt called `prompt`.

    Raises:
        ConfigError: the file cannot be read, or has no prompts.
    """
    path = Path(source)
    path = path / BEST_FILE if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
        values: Any = json.loads(text) if path.suffix == ".json" else {"prompt": text.strip()}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the prompts {str(path)!r}: expected a run of `whet optimize-prompt`, or "
            f"a .json or .txt file: {error}"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{str(path)!r} is not an object of prompts by name")
    named = cast(dict[str, JsonValue], values)
    resources: dict[str, JsonValue] = {
        name: {"template": value} if isinstance(value, str) else value
        for name, value in named.items()
    }
    find_prompts(resources)
    return resources


def read_prompts(specs: Sequence[str]) -> dict[str, dict[str, JsonValue]]:
    """Read `--prompt [NAME=]FILE` flags, by the name of their model. Raises ConfigError."""
    found: dict[str, dict[str, JsonValue]] = {}
    for spec in specs:
        named = NAME_AND_FILE.fullmatch(spec)
        name, source = named.groups() if named else (ALL_MODELS, spec)
        found[name] = load_prompts(source)
    return found


def find_prompts(resources: Mapping[str, JsonValue]) -> dict[str, str]:
    """Return the resources that are prompt templates. Raises ConfigError if there are none."""
    found: dict[str, str] = {}
    for name, value in resources.items():
        match value:
            case {"template": str(template)}:
                found[name] = template
            case _:
                pass
    if not found:
        raise ConfigError(
            "there is no prompt: expected a resource such as "
            'prompt=PromptTemplate(template="Answer {question}")'
        )
    return found
