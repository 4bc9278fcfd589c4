"""Users' functions and classes by name, and their names."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from whet.errors import ConfigError, boundary
from whet.runners.agent import name_of

FILE_PREFIX = "whet_agent_"
"""Of the names that modules get which were loaded as files."""


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


def spec_of(agent: object) -> str:
    """What `load_function` finds an agent by, in another process.

    Raises:
        ConfigError: it has no such name.
    """
    name, place = name_of(agent), getattr(agent, "__module__", None)
    named = isinstance(agent, type) or hasattr(agent, "__qualname__")
    module = sys.modules.get(place or "")
    if module is not None and not named:  # an object: by the variable that holds it
        name = next((key for key, value in vars(module).items() if value is agent), "")
    if module is None or place == "__main__" or vars(module).get(name) is not agent:
        raise ConfigError(
            f"processes find an agent by its name in a module: {name_of(agent)!r} of {place!r} "
            "has none; put it into a file of its own, at its top level, and import it"
        )
    if place and place.startswith(FILE_PREFIX):
        return f"{module.__file__}:{name}"
    return f"{place}:{name}"


def _import_module(name: str) -> ModuleType:
    sys.path.insert(0, "")
    return importlib.import_module(name)


def _import_file(file: Path) -> ModuleType:
    sys.path.insert(0, str(file.parent))
    # Not the file's own name: an agent in `json.py` must not stand in for the real module.
    found = importlib.util.spec_from_file_location(FILE_PREFIX + file.stem, file)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module
