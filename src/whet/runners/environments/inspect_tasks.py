"""`inspect:FILE@TASK`: a task of Inspect, one evaluation of one sample for each attempt.

Inspect runs one evaluation at a time in a process, so every attempt has a process of its own:
`python -m whet.runners.environments.inspect_tasks` reads what to run from stdin.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import anyio
from pydantic import JsonValue

from whet.errors import AgentFailed, ConfigError, WhetError
from whet.runners.environments.environment import Options, Split, find_split, import_package
from whet.runners.loading import import_file
from whet.types import Endpoint

MARK = "whet-reward:"
"""Begins the line with the reward: tasks print as well."""
SHOWN_CHARS = 600


class InspectTask:
    """A task with its dataset, solver and scorer."""

    def __init__(self, name: str, options: Options) -> None:
        self._name = name
        self._options = options

    def list_tasks(self, split: Split, count: int) -> Sequence[JsonValue]:
        dataset: Sequence[Any] = load_task(self._name, self._options).dataset
        ids = [sample.id if sample.id is not None else n for n, sample in enumerate(dataset, 1)]
        chosen = [id for id in ids if find_split(str(id)) == split]
        return [{"sample": id} for id in chosen[:count]]

    async def rollout(self, task: JsonValue, llm: Endpoint) -> float:
        match task:
            case {"sample": str() | int() as sample}:
                pass
            case _:
                raise AgentFailed(f"not a task of inspect: {task!r:.80}")
        request = {
            "name": self._name,
            "options": dict(self._options),
            "sample": sample,
            "llm": llm.model_dump(exclude={"reward_key"}),
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "whet.runners.environments.inspect_tasks"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            output, errors = await process.communicate(json.dumps(request).encode())
        finally:
            with anyio.CancelScope(shield=True):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        for line in output.decode(errors="replace").splitlines():
            if line.startswith(MARK):
                return float(line.removeprefix(MARK))
        last = " ".join(errors.decode(errors="replace").split())[-SHOWN_CHARS:]
        raise AgentFailed(f"inspect gave no score: {last or 'it printed nothing'}")


def load_task(name: str, options: Options) -> Any:  # Any: a Task of the package
    """Load a task by `FILE@TASK`, or by the file if it has one task. Raises ConfigError."""
    import_package("inspect_ai", "inspect-ai")
    file, _, chosen = name.partition("@")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"inspect takes a file with tasks, as FILE or FILE@TASK; found {name!r}")
    module = import_file(path)
    found: dict[str, Callable[..., Any]] = {}
    for key, value in vars(module).items():
        registered = getattr(value, "__registry_info__", None)
        if callable(value) and registered is not None and registered.type == "task":
            found[key] = value
    if chosen:
        found = {key: value for key, value in found.items() if key == chosen}
    if len(found) != 1:
        raise ConfigError(f"{file!r} has {len(found)} such tasks: name one as {file}@TASK")
    return next(iter(found.values()))(**options)


def run_sample(request: dict[str, Any]) -> float:
    """Evaluate one sample in this process and return its score. Raises AgentFailed."""
    package = import_package("inspect_ai", "inspect-ai")
    models = import_package("inspect_ai.model", "inspect-ai")
    scorers = import_package("inspect_ai.scorer", "inspect-ai")
    llm = request["llm"]
    model = models.get_model(
        f"openai-api/whet/{llm['model']}", base_url=llm["base_url"], api_key=llm["api_key"]
    )
    with tempfile.TemporaryDirectory(prefix="whet-inspect-") as folder:
        [log] = package.eval(
            load_task(request["name"], request["options"]),
            model=model,
            sample_id=[request["sample"]],
            log_dir=folder,
            display="none",
            max_retries=0,
        )
        # Inside: samples are read from the log when they are first used.
        if log.status != "success" or not log.samples:
            reason = log.error.message if log.error else "no sample was run"
            raise AgentFailed(f"the evaluation ended as {log.status}: {reason}")
        scores = log.samples[0].scores
    if not scores:
        raise AgentFailed("the task has no scorer, hence no reward")
    value = next(iter(scores.values())).value
    if isinstance(value, dict):
        value = next(iter(cast(dict[str, Any], value).values()))
    return float(scorers.value_to_float()(value))


def main() -> int:
    """Run the sample that stdin describes, and print its reward."""
    try:
        reward = run_sample(json.load(sys.stdin))
    except WhetError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"\n{MARK}{reward!r}\n")
    return 0


def open_environment(name: str, options: Options) -> InspectTask:
    """Open a task by its file; options are the task's parameters."""
    load_task(name, options)
    return InspectTask(name, options)


if __name__ == "__main__":
    sys.exit(main())
