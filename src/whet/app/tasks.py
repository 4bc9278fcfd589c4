"""Where tasks come from, and which of them a step takes."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, cast

from pydantic import JsonValue

from whet.config import RunConfig
from whet.errors import ConfigError
from whet.types import Rollout, SamplingOverride

Tasks = str | Path | Sequence[JsonValue]
"""A list, or a file with one JSON value a line."""


def load_tasks(source: Tasks) -> list[JsonValue]:
    """Tasks from a list, or from a file with one JSON value a line.

    Raises:
        ConfigError: no such file, a line that is not JSON, or no tasks at all.
    """
    tasks = _read_jsonl(Path(source)) if isinstance(source, (str, Path)) else list(source)
    if not tasks:
        raise ConfigError("there are no tasks: give at least one")
    return tasks


def training_plan(tasks: Sequence[JsonValue], config: RunConfig) -> Callable[[int], list[Rollout]]:
    """The rollouts of each group: every task once an epoch, in an order the seed decides.

    A pure function of the group's number, so a resumed run asks for the same rollouts by the
    same ids.
    """
    # What is reinforced shall be what an evaluation sees.
    temperature = 0.0 if config.algorithm.name == "greedy" else config.runner.temperature

    def plan(group: int) -> list[Rollout]:
        task = _nth_task(tasks, group, config.seed)
        return [
            Rollout(
                id=f"train-{group:06d}-{sample:03d}",
                group=f"train-{group:06d}",
                task=task,
                sampling=SamplingOverride(temperature=temperature),
                timeout_s=config.runner.timeout_s,
                max_attempts=config.runner.max_attempts,
            )
            for sample in range(config.group_size)
        ]

    return plan


def _nth_task(tasks: Sequence[JsonValue], number: int, seed: int) -> JsonValue:
    epoch, place = divmod(number, len(tasks))
    order = list(range(len(tasks)))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tasks[order[place]]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON value")


def _read_jsonl(path: Path) -> list[JsonValue]:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the tasks {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the tasks {str(path)!r} are not UTF-8 text: {error}") from error
    tasks: list[JsonValue] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                tasks.append(cast(JsonValue, json.loads(line, parse_constant=_refuse)))
            except ValueError as error:
                raise ConfigError(
                    f"{str(path)!r} line {number} is not JSON ({error}); found {line[:60]!r}"
                ) from error
    return tasks
