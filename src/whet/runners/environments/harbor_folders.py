"""`harbor:DIR`: folders of Harbor tasks, which need containers that are not started here."""

from pathlib import Path
from typing import NoReturn

from whet.errors import ConfigError
from whet.runners.environments.environment import Options


def open_environment(name: str, options: Options) -> NoReturn:
    """Refuse a folder of tasks, with what runs them. Raises ConfigError."""
    tasks = sorted(file.parent.name for file in Path(name).glob("*/task.toml"))
    if not tasks:
        raise ConfigError(f"harbor takes a folder of task folders with task.toml; found {name!r}")
    raise ConfigError(
        f"{name!r} has {len(tasks)} Harbor tasks, each of which needs a container and its own "
        "agent in it: run them with the command `harbor`, as a command after --"
    )
