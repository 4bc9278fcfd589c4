"""Inputs of a run besides its agent: tasks, and the resources and hooks of attempts."""

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn, cast

from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError

from whet.config import CurriculumConfig, RunConfig
from whet.errors import ConfigError, NotFound
from whet.protocols import Listings, Resources
from whet.runners.agent import POLICY, Agent, check_resources, inspect_agent
from whet.runners.hooks import Hooks
from whet.runners.judges.judge import Judge
from whet.types import (
    GATEWAY_PREFIX,
    POLICY_PREFIX,
    RETRYABLE,
    RUNNERS_PREFIX,
    TRAINER,
    Name,
    Rollout,
    SamplingOverride,
    StepRecord,
)

Tasks = str | Path | Sequence[Any]  # Any: a JSON value, whatever the caller's dicts are typed as
"""A list, or a file with one JSON value a line, or several as `a.jsonl=0.7,b.jsonl=0.3`."""

RESERVED_PREFIXES = (GATEWAY_PREFIX, POLICY_PREFIX, RUNNERS_PREFIX)

ResourceValues = Mapping[str, object]
"""JSON by name; a `PromptTemplate`, an `Endpoint` or another pydantic model is published as its
JSON."""


@dataclass(frozen=True, slots=True)
class AgentInputs:
    """Resources, hooks and judge of the attempts of a run."""

    resources: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    hooks: tuple[Hooks, ...] = ()
    judge: Judge | None = None
    """Ranks the answers of each training group."""


NO_INPUTS = AgentInputs()

# ------------------------------------------------------------------- tasks

MAX_DEPTH = 128
"""Lists and objects within one another in a task; pydantic reads 199 from JSON."""

PLAIN = frozenset({str, int, bool, type(None)})
"""Types whose every value is JSON."""


class TaskFile(list[JsonValue]):
    """Tasks of a file, or of several, and its name."""

    def __init__(self, tasks: Iterable[JsonValue], source: str) -> None:
        super().__init__(tasks)
        self.source = source


class TaskMix(TaskFile):
    """Tasks of several files, and the share of the groups that each file gets."""

    def __init__(
        self, parts: Sequence[tuple[Sequence[JsonValue], float]], source: str = ""
    ) -> None:
        super().__init__((task for tasks, _ in parts for task in tasks), source)
        self.sizes = [len(tasks) for tasks, _ in parts]
        total = sum(weight for _, weight in parts)
        self.shares = [weight / total for _, weight in parts]


def load_tasks(source: Tasks, name: str = "tasks") -> list[JsonValue]:
    """Tasks from a list, or from a file with one JSON value a line, or from several files.

    Errors of a list call it by `name`.

    Raises:
        ConfigError: the file cannot be read, a line or a task is not JSON, or there are no tasks.
    """
    if isinstance(source, str) and "=" in source and not Path(source).exists():
        return _load_mix(source)
    if isinstance(source, (str, Path)):
        tasks: list[Any] = TaskFile((t for _, t in read_jsonl(Path(source), "tasks")), str(source))
    elif isinstance(source, Mapping):  # such as the splits of a dataset: a list has its keys
        keys = ", ".join(map(repr, list(source)[:3]))
        raise ConfigError(f"{name} is a mapping with the keys {keys}: expected a list of tasks")
    else:
        tasks = list(source)
    if not tasks:
        if isinstance(source, (str, Path)):
            raise ConfigError(f"found no tasks in {str(source)!r}: expected one JSON value a line")
        raise ConfigError("found no tasks: expected at least one")
    converted = [_convert(task, (f"{name}[{index}]",)) for index, task in enumerate(tasks)]
    return TaskFile(converted, tasks.source) if isinstance(tasks, TaskFile) else converted


def describe_tasks(tasks: Sequence[JsonValue]) -> str:
    """Return how many tasks there are, and where they are from."""
    where = f"of {tasks.source}" if isinstance(tasks, TaskFile) else "in Python"
    return f"{len(tasks):,} tasks {where}"


def _convert(value: object, path: tuple[object, ...]) -> JsonValue:
    """Copy a JSON value, with lists for tuples: tasks may come from `zip` or a table's rows.

    `path` is the task's name, and the keys in it. Raises ConfigError for any other value.
    """
    if len(path) > MAX_DEPTH:
        raise ConfigError(f"{path[0]} is nested too deeply, or contains itself")
    # Without a call for most values, which would take most of the time.
    if isinstance(value, (list, tuple)):
        items = enumerate(cast(Sequence[JsonValue], value))
        return [each if type(each) in PLAIN else _convert(each, (*path, n)) for n, each in items]
    if isinstance(value, dict):
        for key in cast(dict[object, object], value):
            if not isinstance(key, str):
                at = _format_path(path)
                raise ConfigError(
                    f"{at} has the key {key!r}: expected keys that are str, as in JSON"
                )
        return {
            key: each if type(each) in PLAIN else _convert(each, (*path, key))
            for key, each in cast(dict[str, JsonValue], value).items()
        }
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{_format_path(path)} is {value}: expected a finite number, or None")
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise ConfigError(
        f"{_format_path(path)} is of type {type(value).__name__}: expected a JSON value"
    )


def _format_path(path: tuple[object, ...]) -> str:
    task, *keys = path
    return f"{task}{''.join(f'[{key!r}]' for key in keys)}"


def check_held_out(config: RunConfig, held_out: Sequence[JsonValue]) -> None:
    """Raise ConfigError if there is nothing to evaluate during training."""
    if config.evaluation.every and not held_out:
        raise ConfigError("evaluation.every needs held-out tasks: give them, or leave it out")


def check_policies(config: RunConfig, resources: Mapping[str, JsonValue]) -> None:
    """Raise ConfigError for several policies that cannot be trained or served by name."""
    if not config.policies:
        return
    if all(policy.frozen for policy in config.policies.values()):
        raise ConfigError("every policy is frozen: leave at least one to train")
    if shared := resources.keys() & config.policies.keys():
        raise ConfigError(f"{min(shared)!r} is both a policy and a resource: rename one of them")


def check_one_policy(config: RunConfig, command: str) -> None:
    """Raise ConfigError if several policies are given to what runs one."""
    if config.policies:
        raise ConfigError(f"{command} runs one policy: leave out config section 'policies'")


def _load_mix(source: str) -> TaskMix:
    parts: list[tuple[Sequence[JsonValue], float]] = []
    for part in source.split(","):
        path, _, text = part.rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = 0.0
        if not path or not 0 < weight < float("inf"):
            raise ConfigError(
                f"expected a file and its share, such as a.jsonl=0.7,b.jsonl=0.3, found {part!r}"
            )
        parts.append((load_tasks(Path(path)), weight))
    return TaskMix(parts, source)


def plan_rollouts(
    tasks: Sequence[JsonValue],
    config: RunConfig,
    *,
    group_rewards: Sequence[float | None] | None = None,
) -> Callable[[int], list[Rollout]]:
    """The rollouts of each group: every task once an epoch, shuffled by the seed.

    A pure function of the group's number, so a resumed run plans the same rollouts with the same
    ids. With a curriculum it also depends on the mean rewards of earlier groups in their order,
    which the caller appends to `group_rewards` after each step.

    Raises:
        ConfigError: the config has a curriculum, and there are no `group_rewards`.
    """
    if group_rewards is None and config.curriculum != CurriculumConfig():
        raise ConfigError("a curriculum needs the rewards of earlier groups: leave it out here")
    order = _TaskOrder(tasks, config, () if group_rewards is None else group_rewards)
    # Greedy outputs are reinforced as an evaluation samples them.
    temperature = 0.0 if config.algorithm.name == "greedy" else config.runner.temperature
    # A failure with a reward counts: another try would hide it.
    rewards = config.failure_reward.model_dump()
    retried = tuple(kind for kind in RETRYABLE if rewards.get(kind) is None)

    def plan(group: int) -> list[Rollout]:
        task = tasks[order.find(group)]
        return [
            Rollout(
                id=f"train-{group:06d}-{sample:03d}",
                group=f"train-{group:06d}",
                task=task,
                sampling=SamplingOverride(temperature=temperature),
                timeout_s=config.runner.timeout_s,
                max_attempts=config.runner.max_attempts,
                retried=retried,
            )
            for sample in range(config.group_size)
        ]

    return plan


async def read_group_rewards(
    done: Sequence[StepRecord], store: Listings, config: RunConfig
) -> list[float | None]:
    """Mean reward of each group of completed steps, in order; empty without a curriculum."""
    rewards: list[float | None] = []
    if config.curriculum == CurriculumConfig():
        return rewards
    for first in (id for record in done for id in record.consumed[:: config.group_size]):
        group = first.rpartition("-")[0]
        ended = await store.rollouts(group=group, limit=config.group_size)
        known = [each.reward for each in ended if each.reward is not None]
        rewards.append(fmean(known) if known else None)
    return rewards


class _TaskOrder:
    """Indexes of the tasks of all groups, in order."""

    def __init__(
        self, tasks: Sequence[JsonValue], config: RunConfig, rewards: Sequence[float | None]
    ) -> None:
        mix = tasks if isinstance(tasks, TaskMix) else TaskMix([(tasks, 1.0)])
        self._shares = mix.shares
        self._cycles = [_TaskCycle(size, config.seed, n) for n, size in enumerate(mix.sizes)]
        self._starts = [sum(mix.sizes[:n]) for n in range(len(mix.sizes))]
        self._drawn = [0] * len(mix.sizes)
        self._chosen: list[int] = []
        self._curriculum = config.curriculum
        self._rewards = rewards
        self._last_reward: dict[int, float | None] = {}
        # A group is planned before the groups of its own window have ended: its task depends on
        # none of them, however the loop runs.
        ahead = config.loop.max_staleness + 1 if config.loop.name == "overlapped" else 1
        self._lag = config.tasks_per_step * max(ahead, config.algorithm.oversample)

    def find(self, group: int) -> int:
        """Return the index of a group's task."""
        while len(self._chosen) <= group:
            self._chosen.append(self._choose(len(self._chosen)))
        return self._chosen[group]

    def _choose(self, group: int) -> int:
        ended = group - self._lag
        if 0 <= ended < len(self._rewards):
            self._last_reward[self._chosen[ended]] = self._rewards[ended]
        # The file that is furthest behind its share of the groups.
        behind = [
            share * (group + 1) - drawn
            for share, drawn in zip(self._shares, self._drawn, strict=True)
        ]
        part = behind.index(max(behind))
        self._drawn[part] += 1
        start, cycle = self._starts[part], self._cycles[part]
        found = start
        for _ in range(cycle.size):  # if all are skipped, the last one is used
            found = start + cycle.next()
            weight = self._curriculum.weigh(self._last_reward.get(found))
            if cycle.draw() < weight:
                break
        return found


class _TaskCycle:
    """Endless epochs over the tasks of a file, each in an order of its own."""

    def __init__(self, size: int, seed: int, part: int) -> None:
        self.size = size
        self._seed = f"{seed}/{part}" if part else f"{seed}"
        self._count = 0
        self._order: list[int] = []

    def next(self) -> int:
        epoch, index = divmod(self._count, self.size)
        if index == 0:
            self._order = list(range(self.size))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        self._count += 1
        return self._order[index]

    def draw(self) -> float:
        """Return a number from 0 to 1 for the task that `next` returned."""
        return random.Random(f"{self._seed}/draw/{self._count}").random()


def read_jsonl(path: Path, what: str, *, strict: bool = True) -> list[tuple[int, JsonValue]]:
    """The values of a file with one JSON value a line, each with the number of its line.

    `strict` refuses numbers that JSON does not have, such as the -Infinity that Python writes.

    Raises:
        ConfigError: the file cannot be read, or a line is not JSON.
    """
    try:
        # Not `splitlines`: a text may contain U+2028. Some editors write a byte-order mark.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the {what} {str(path)!r} are not UTF-8 text: {error}") from error
    # Any: functions of different signatures.
    hooks: dict[str, Any] = {"parse_constant": _refuse_constant, "parse_float": _parse_float}
    hooks = hooks if strict else {}
    values: list[tuple[int, JsonValue]] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                values.append((number, cast(JsonValue, json.loads(line, **hooks))))
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"{str(path)!r} line {number} is not JSON ({error}); found {line[:60]!r}, "
                    "expected one JSON value on each line"
                ) from error
    if len(values) == 1 and isinstance(array := values[0][1], list) and array:
        raise ConfigError(
            f"{str(path)!r} is one JSON array of {len(array)} values: write each on a line of "
            "its own, without the array's brackets and commas"
        )
    return values


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value")


def _parse_float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text} is too large")
    return value


# ------------------------------------------------------------------- resources

_NAME: TypeAdapter[str] = TypeAdapter(Name)
_JSON: TypeAdapter[JsonValue] = TypeAdapter(JsonValue)


def parse_resources(values: ResourceValues | None) -> dict[str, JsonValue]:
    """Resources as the JSON that is published.

    Raises:
        ConfigError: a name is invalid or reserved, or a value is not JSON.
    """
    found: dict[str, JsonValue] = {}
    for name, value in (values or {}).items():
        try:
            _NAME.validate_python(name)
        except ValidationError as error:
            raise ConfigError(error.errors()[0]["msg"].removeprefix("Value error, ")) from error
        if name in (POLICY, TRAINER) or name.startswith(RESERVED_PREFIXES):
            raise ConfigError(f"the resource name {name!r} is reserved: choose another")
        plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        try:
            found[name] = _JSON.validate_python(plain)
        except ValidationError as error:
            kind = type(value).__name__
            raise ConfigError(
                f"the resource {name!r} is {kind}: expected a JSON value or a pydantic model"
            ) from error
    return found


def check_parameters(agent: Agent, resources: Mapping[str, JsonValue]) -> None:
    """Raise ConfigError if the agent has a parameter that no resource fills."""
    if not isinstance(agent, type):
        check_resources(inspect_agent(agent).parameters, resources)


async def publish_resources(store: Resources, values: Mapping[str, JsonValue]) -> dict[str, int]:
    """Publish resources that are not the newest already; returns their versions."""
    versions: dict[str, int] = {}
    for name, value in values.items():
        try:
            newest = await store.latest(name)
        except NotFound:
            versions[name] = await store.publish(name, value)
        else:
            same = newest.value == value
            versions[name] = newest.version if same else await store.publish(name, value)
    return versions
