"""The protocol of environments, and how one is found by its name."""

import importlib
import importlib.metadata
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, Protocol
from urllib.parse import parse_qsl

from pydantic import JsonValue

from whet.errors import ConfigError, boundary
from whet.types import Endpoint

Split = Literal["train", "held_out"]
Options = Mapping[str, JsonValue]

GROUP = "whet.environments"
"""Entry points of further environments: a name, and `module:function`."""

PROVIDERS = {
    "reasoning-gym": "whet.runners.environments.reasoning_gym",
    "verifiers": "whet.runners.environments.verifiers_tasksets",
    "inspect": "whet.runners.environments.inspect_tasks",
    "openenv": "whet.runners.environments.openenv_servers",
    "harbor": "whet.runners.environments.harbor_folders",
}
"""Module of each kind of environment; its function is `open_environment`."""

TASKS = {"train": 256, "held_out": 64}
"""Tasks of a split, unless the options `tasks` and `held_out` say otherwise."""
HELD_OUT = 5
"""One in this many tasks is held out, where a package has no splits of its own."""


class Environment(Protocol):
    """Tasks with a loop and a reward, as another package defines them.

    A kind of environment is a function `open_environment(name, options)` that returns one. It is
    called in every process that lists tasks or runs attempts, so it has to give the same tasks for
    the same name and options.
    """

    def list_tasks(self, split: Split, count: int) -> Sequence[JsonValue]:
        """Return at most `count` tasks of a split, the same ones each time; splits share none."""
        ...

    async def rollout(self, task: JsonValue, llm: Endpoint) -> float:
        """Run a task with the model at an endpoint, and return the reward."""
        ...


@dataclass(frozen=True, slots=True)
class EnvironmentName:
    """The name of an environment: `KIND:NAME`, with options as in a URL's query."""

    kind: str
    name: str
    options: Options

    @classmethod
    def parse(cls, text: str) -> "EnvironmentName":
        """Parse `reasoning-gym:chain_sum?min_terms=2`. Raises ConfigError."""
        kind, colon, rest = text.partition(":")
        name, _, query = rest.partition("?")
        if not colon or not kind or not name:
            raise ConfigError(
                f"an environment is KIND:NAME, such as reasoning-gym:chain_sum; found {text!r}"
            )
        pairs = parse_qsl(query, keep_blank_values=True)
        return cls(kind, name, {key: _parse_value(value) for key, value in pairs})

    def count(self, split: Split) -> int:
        """Tasks of a split. Raises ConfigError if an option is not a count."""
        return read_count(self.options, "tasks" if split == "train" else split, TASKS[split])

    def list_own_options(self) -> Options:
        """The options of the environment itself."""
        return {k: v for k, v in self.options.items() if k not in ("tasks", "held_out")}


def open_environment(name: EnvironmentName) -> Environment:
    """Open an environment of a known kind, or of an entry point.

    Raises:
        ConfigError: the kind is unknown, its package is missing, or it refuses the name.
    """
    if name.kind in PROVIDERS:
        opener = vars(importlib.import_module(PROVIDERS[name.kind]))["open_environment"]
    else:
        found = importlib.metadata.entry_points(group=GROUP, name=name.kind)
        if not found:
            raise ConfigError(
                f"unknown environment {name.kind!r}: expected one of {', '.join(PROVIDERS)}, or an "
                f"entry point of the group {GROUP!r}"
            )
        with boundary(ConfigError, f"cannot import the environment {name.kind!r}"):
            opener = next(iter(found)).load()
    with boundary(ConfigError, f"cannot open the environment {name.kind}:{name.name}"):
        return opener(name.name, name.list_own_options())


def list_tasks(name: EnvironmentName, split: Split) -> list[JsonValue]:
    """List the tasks of a split as JSON. Raises ConfigError if there are none."""
    environment = open_environment(name)
    with boundary(ConfigError, f"the environment {name.kind}:{name.name} listed no tasks"):
        tasks = json.loads(json.dumps(list(environment.list_tasks(split, name.count(split)))))
    if not tasks and split == "train":
        raise ConfigError(f"the environment {name.kind}:{name.name} has no tasks: check its name")
    return tasks


def find_split(key: str) -> Split:
    """Return the split of a task by what identifies it, whatever tasks there are beside it."""
    return "train" if zlib.crc32(key.encode()) % HELD_OUT else "held_out"


def read_count(options: Options, key: str, default: int) -> int:
    """The option `key`, or its default. Raises ConfigError if it is not a positive integer."""
    value = options.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"the option {key!r} is a positive integer; found {value!r}")
    return value


def import_package(module: str, package: str) -> ModuleType:
    """Import a package of another environment. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"no package {package!r} in this Python ({error}): pip install {package}, or install "
            "it with whet and its extra 'runner' in an environment of its own and name that with "
            "--env-python"
        ) from error


def _parse_value(text: str) -> JsonValue:
    try:
        return json.loads(text)
    except ValueError:
        return text
