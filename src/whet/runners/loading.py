"""Load users' functions and classes by name, and find the name of one."""

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from whet.errors import ConfigError, boundary
from whet.runners.agent import get_name
from whet.runners.environments.hosted_agent import EnvironmentAgent

ENVIRONMENT = "environment "
"""Prefix of the specs of environments."""

FILE_PREFIX = "whet_agent_"
"""Prefix of the module names of files that were loaded by path."""

_imported: dict[str, tuple[Path, int, int]] = {}
"""Files by the names of their modules, each with the time of its last change and its size."""


def load_function(spec: str, kind: str = "agent") -> object:
    """Load `module:function` or `file.py:function`.

    Raises:
        ConfigError: the name does not exist, or its module cannot be imported.
    """
    source, colon, name = spec.rpartition(":")
    if not colon:
        is_program = kind == "agent" and not spec.endswith(".py") and Path(spec).is_file()
        other = "; a program in another language is a command after `--`" if is_program else ""
        raise ConfigError(
            f"specify the {kind} as module:function or file.py:function; found {spec!r}{other}"
        )
    with boundary(ConfigError, f"cannot import the {kind} {spec!r}"):
        try:
            module = import_file(Path(source)) if source.endswith(".py") else _import_module(source)
        except SystemExit as error:
            raise ConfigError(
                f"{source!r} ends the process when it is imported: put what it runs as a program "
                'under `if __name__ == "__main__":`'
            ) from error
    if name not in vars(module):
        close = difflib.get_close_matches(name, vars(module), n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"{source!r} has no {name!r}{hint}")
    return vars(module)[name]


def load_agent(spec: str) -> object:
    """Load an agent by what `get_spec` returned for it: a name, or that of an environment."""
    if spec.startswith(ENVIRONMENT):
        return EnvironmentAgent(spec.removeprefix(ENVIRONMENT))
    return load_function(spec)


def get_spec(agent: object) -> str:
    """Return the spec by which `load_agent` finds an agent in another process.

    Raises:
        ConfigError: it has no such name.
    """
    if isinstance(agent, EnvironmentAgent):
        return f"{ENVIRONMENT}{agent.spec}"
    name, module_name = get_name(agent), getattr(agent, "__module__", None)
    has_name = isinstance(agent, type) or hasattr(agent, "__qualname__")
    module = sys.modules.get(module_name or "")
    if module is not None and not has_name:  # an object: by the variable that holds it
        name = next((key for key, value in vars(module).items() if value is agent), "")
    if module is None or module_name == "__main__" or vars(module).get(name) is not agent:
        raise ConfigError(
            f"processes import an agent by its name: {get_name(agent)!r} of {module_name!r} is not "
            "at the top level of a module; put it into a file of its own, and import it"
        )
    if module_name and module_name.startswith(FILE_PREFIX):
        return f"{module.__file__}:{name}"
    return f"{module_name}:{name}"


def _import_module(name: str) -> ModuleType:
    sys.path.insert(0, "")
    return importlib.import_module(name)


def import_file(file: Path) -> ModuleType:
    """Import a Python file, from whose folder it may import others.

    An unchanged file is imported once: an agent and its judge or hooks may be in one file.
    """
    # Not under the file's own name: an agent in `json.py` must not replace the real module. The
    # digest differs between files of one name, and is the same in every process of a pool.
    digest = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:8]
    name, found = f"{FILE_PREFIX}{file.stem}_{digest}", file.stat()
    version = file.resolve(), found.st_mtime_ns, found.st_size
    if _imported.get(name) == version and name in sys.modules:
        return sys.modules[name]
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    _imported.pop(name, None)
    spec.loader.exec_module(module)
    _imported[name] = version
    return module
