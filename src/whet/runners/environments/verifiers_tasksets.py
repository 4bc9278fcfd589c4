"""`verifiers:TASKSET`: a taskset of verifiers, with its own agent and its own scoring.

Its agent reaches the model through verifiers' relay, which passes requests on to the attempt's
endpoint unchanged.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from pydantic import JsonValue

from whet.errors import AgentFailed
from whet.runners.environments.environment import HELD_OUT, Options, Split, import_package
from whet.types import Endpoint

NO_KEY = "WHET_NO_KEY"
"""A variable that is not set: the key of an attempt travels in a header instead."""


class VerifiersTaskset:
    """A taskset by its id; options are those of the taskset, `harness` and `runtime`."""

    def __init__(self, id: str, options: Options) -> None:
        self._vf = import_package("verifiers.v1", "verifiers")
        loaders = import_package("verifiers.v1.utils.loaders", "verifiers")
        own = {key: value for key, value in options.items() if key not in ("harness", "runtime")}
        agent = {
            "harness": {"id": options.get("harness", "null")},
            # Locally, unless a container is asked for: the default is a paid sandbox.
            "runtime": {"type": options.get("runtime", "subprocess")},
        }
        config = loaders.resolve_env_config({"taskset": {"id": id, **own}, "agent": agent})
        self._environment = loaders.load_environment(config)

    def list_tasks(self, split: Split, count: int) -> Sequence[JsonValue]:
        tasks = enumerate(self._environment.taskset)
        numbers = (number for number, _ in tasks if _find_split(number) == split)
        return [{"number": number} for number in islice(numbers, count)]

    async def rollout(self, task: JsonValue, llm: Endpoint) -> float:
        chosen: Any = None  # Any: a task of the package
        match task:
            case {"number": int(number)}:
                tasks: Iterable[Any] = self._environment.taskset
                chosen = next(islice(tasks, number, None), None)
            case _:
                pass
        if chosen is None:
            raise AgentFailed(f"not a task of verifiers: {task!r:.80}")
        client = self._vf.EvalClientConfig(
            base_url=llm.base_url, api_key_var=NO_KEY, headers={"x-api-key": llm.api_key}
        )
        context = self._vf.ModelContext(model=llm.model, client=client)
        async with self._environment.serving():
            episode: Any = await self._environment.run_episode(chosen, context)
        if not episode.ok:
            errors = [str(e) for e in episode.errors] or [
                str(e) for trace in episode.traces for e in trace.errors
            ]
            raise AgentFailed(f"the episode failed: {'; '.join(errors)[:600]}")
        return float(episode.traces[0].reward)


def _find_split(number: int) -> Split:
    return "held_out" if number % HELD_OUT == HELD_OUT - 1 else "train"


def open_environment(name: str, options: Options) -> VerifiersTaskset:
    """Open a taskset by its id."""
    return VerifiersTaskset(name, options)
