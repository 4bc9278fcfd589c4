"""`reasoning-gym:FAMILY`: procedurally generated reasoning tasks with verifiers of their own."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

from pydantic import JsonValue

from whet.errors import AgentFailed, ConfigError
from whet.runners.environments.completion import JsonMessage, complete
from whet.runners.environments.environment import (
    HELD_OUT,
    Options,
    Split,
    find_split,
    import_package,
    read_count,
)
from whet.types import Endpoint

SEEDS: dict[Split, int] = {"train": 1, "held_out": 1_000_003}
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
GENERATED: dict[Split, int] = {"train": 8, "held_out": 8 * HELD_OUT}
"""Questions generated for each task that is wanted: equal ones are dropped."""


class ReasoningGym:
    """A family of tasks. A task names its question by seed and index, and is generated again."""

    def __init__(self, family: str, options: Options) -> None:
        self._family = family
        self._system = options.get("system")
        self._max_tokens = read_count(options, "max_tokens", 512)
        own = ("system", "max_tokens")
        self._options = {key: value for key, value in options.items() if key not in own}
        self._create = cache(self._create_dataset)
        self._create(SEEDS["train"], 1)  # an unknown family or option is an error now

    def list_tasks(self, split: Split, count: int) -> Sequence[JsonValue]:
        """Generate distinct tasks of a split; the question itself says which split it is in."""
        seed, size = SEEDS[split], GENERATED[split] * count
        dataset = self._create(seed, size)
        found: dict[str, JsonValue] = {}
        for index in range(size):
            question = str(dataset[index]["question"])
            if question not in found and find_split(question) == split:
                task: JsonValue = {"seed": seed, "index": index, "size": size}
                found[question] = {"question": question, **task}
                if len(found) == count:
                    break
        return list(found.values())

    async def rollout(self, task: JsonValue, llm: Endpoint) -> float:
        """Ask once; the answer is what stands between `<answer>` tags, or the whole text."""
        match task:
            case {"question": str(question), "seed": int(seed), "index": int(index), "size": size}:
                dataset = self._create(seed, int(cast(int, size)))
            case _:
                raise AgentFailed(f"not a task of reasoning-gym: {task!r:.80}")
        messages: list[JsonMessage] = [{"role": "user", "content": question}]
        if self._system:
            messages.insert(0, {"role": "system", "content": self._system})
        text = await complete(llm, messages, max_tokens=self._max_tokens)
        tagged = ANSWER.findall(text)
        answer = (tagged[-1] if tagged else text).strip()
        return float(dataset.score_answer(answer=answer, entry=dataset[index]))

    def _create_dataset(self, seed: int, size: int) -> Any:  # Any: the package is not typed
        package = import_package("reasoning_gym", "reasoning-gym")
        try:
            return package.create_dataset(self._family, seed=seed, size=size, **self._options)
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"reasoning-gym refuses {self._family!r}: {error}") from error


def open_environment(name: str, options: Options) -> ReasoningGym:
    """Open a family by its name; options are those of its dataset, `system` and `max_tokens`."""
    return ReasoningGym(name, options)
