"""An environment as an ordinary agent, in this Python or in the one that has its package.

`python -m whet.runners.environments.hosted_agent NAME SPLIT` lists tasks, for another Python.
"""

import json
import os
import subprocess
import sys
from functools import cached_property
from pathlib import Path

from pydantic import JsonValue

from whet.errors import ConfigError, WhetError
from whet.runners.environments.environment import (
    Environment,
    EnvironmentName,
    Split,
    list_tasks,
    open_environment,
)
from whet.types import Endpoint

LIST_TIMEOUT_S = 600.0
MARK = "whet-tasks:"
"""Begins the line with the tasks: packages print as well."""


class EnvironmentAgent:
    """Runs the loop of an environment on a task; see `load_environment`."""

    def __init__(self, text: str, python: str | None = None) -> None:
        """`python` is the interpreter that has the package, if not this one."""
        self.spec = text
        self.python = python
        self.__name__ = text
        self._name = EnvironmentName.parse(text)

    @cached_property
    def _environment(self) -> Environment:
        return open_environment(self._name)

    async def __call__(self, task: JsonValue, llm: Endpoint) -> float:
        """Run one attempt."""
        return await self._environment.rollout(task, llm)

    def list_tasks(self, split: Split) -> list[JsonValue]:
        """List the tasks of a split. Raises ConfigError."""
        if self.python is None:
            return list_tasks(self._name, split)
        return _list_in_other_python(self.python, self.spec, split)


def load_environment(text: str, python: str | None = None) -> EnvironmentAgent:
    """Make an agent of an environment by its name.

    Raises:
        ConfigError: the name is invalid, or there is no such interpreter.
    """
    if python is not None and not os.access(python, os.X_OK):
        raise ConfigError(f"expected a Python interpreter for --env-python, found {python!r}")
    return EnvironmentAgent(text, None if python is None else str(Path(python).absolute()))


def _list_in_other_python(python: str, text: str, split: Split) -> list[JsonValue]:
    command = [python, "-m", "whet.runners.environments.hosted_agent", text, split]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=LIST_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"cannot list the tasks of {text!r} with {python!r}: {error}") from error
    for line in ended.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    last = (ended.stderr.strip() or ended.stdout.strip() or "it printed nothing").splitlines()[-1]
    raise ConfigError(f"{python!r} lists no tasks of {text!r}: {last.removeprefix('whet: ')}")


def main() -> int:
    """List the tasks of an environment to stdout."""
    text, split = sys.argv[1:]
    assert split in ("train", "held_out")
    try:
        tasks = list_tasks(EnvironmentName.parse(text), split)
    except WhetError as error:
        sys.stderr.write(f"whet: {' '.join(str(error).split())}\n")
        return 2
    sys.stdout.write(f"\n{MARK}{json.dumps(tasks)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
