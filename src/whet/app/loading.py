"""What commands load by name: users' functions, and our own modules that need extras."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from whet.errors import ConfigError, MissingExtra, boundary


def load_function(spec: str, what: str = "agent") -> object:
    """What `module:function` or `file.py:function` names.

    Raises:
        ConfigError: there is none, or its module cannot be imported.
    """
    place, colon, name = spec.rpartition(":")
    if not colon:
        raise ConfigError(f"an {what} is named module:function or file.py:function; found {spec!r}")
    with boundary(ConfigError, f"cannot import the {what} {spec!r}"):
        module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    if name not in vars(module):
        raise ConfigError(f"{place!r} has no {name!r}")
    return vars(module)[name]


def with_extra(module: str, name: str, extra: str = "local") -> Callable[..., Any]:
    """A function of a module that needs an extra. Any: it is imported by name."""
    try:
        return vars(importlib.import_module(module))[name]
    except ModuleNotFoundError as error:
        raise MissingExtra.of(f"this command ({error})", extra) from error


def _import_module(name: str) -> ModuleType:
    sys.path.insert(0, "")
    return importlib.import_module(name)


def _import_file(file: Path) -> ModuleType:
    sys.path.insert(0, str(file.parent))
    # Not the file's own name: an agent in `json.py` must not stand in for the real module.
    found = importlib.util.spec_from_file_location(f"whet_agent_{file.stem}", file)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module
