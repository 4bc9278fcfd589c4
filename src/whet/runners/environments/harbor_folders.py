"""`harbor:DIR`: folders of Harbor tasks, in namespaces of bubblewrap in place of their containers.

A task whose Dockerfile names an image, a working directory, variables and files to copy, and no
more, runs with the programs of this machine. Others need a container, which is not started here.
"""

import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from anyio import to_thread
from pydantic import JsonValue

from whet.errors import AgentFailed, ConfigError
from whet.runners.environments.completion import JsonMessage, complete
from whet.runners.environments.environment import Options, Split, find_split, read_count
from whet.runners.environments.harbor_sandbox import HarborSandbox
from whet.runners.environments.harbor_tasks import HarborTask, NeedsContainer, read_task
from whet.runners.sandboxes import choose_sandbox
from whet.runners.sandboxes.sandbox import SandboxLimits
from whet.types import Endpoint

logger = logging.getLogger(__name__)

OPTIONS = {"max_turns": 8, "max_tokens": 512}
COMMAND_S = 60.0
BLOCK = re.compile(r"```(?:sh|bash)?\n(.*?)```", re.DOTALL)
SYSTEM = (
    "You work in a Linux shell without a network. Reply with one block of commands, ```sh ... ```, "
    "and you will see what it prints. Reply without a block once the task is done."
)


class HarborFolder:
    """The tasks of a folder that run without a container."""

    def __init__(self, tasks: dict[str, HarborTask], options: dict[str, int]) -> None:
        self._tasks = tasks
        self._options = options

    def list_tasks(self, split: Split, count: int) -> Sequence[JsonValue]:
        """Name the tasks of a split; the name itself says which split it is in."""
        names = [name for name in self._tasks if find_split(name) == split]
        return [{"name": name} for name in names[:count]]

    async def rollout(self, task: JsonValue, llm: Endpoint) -> float:
        """Let the model work in a shell; the reward is what the tests write."""
        match task:
            case {"name": str(name)} if name in self._tasks:
                found = self._tasks[name]
            case _:
                raise AgentFailed(f"not a task of this folder: {task!r:.80}")
        with TemporaryDirectory(prefix="whet-") as folder:
            sandbox = HarborSandbox(found, Path(folder), SandboxLimits())
            await to_thread.run_sync(sandbox.prepare)
            await self._work(found, sandbox, llm)
            return await to_thread.run_sync(sandbox.verify)

    async def _work(self, task: HarborTask, sandbox: HarborSandbox, llm: Endpoint) -> None:
        deadline = time.monotonic() + task.agent_s
        messages: list[JsonMessage] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": task.instruction},
        ]
        for _ in range(self._options["max_turns"]):
            reply = await complete(llm, messages, max_tokens=self._options["max_tokens"])
            blocks = BLOCK.findall(reply)
            left = deadline - time.monotonic()
            if not blocks or left <= 0:
                return
            output = await to_thread.run_sync(sandbox.run, blocks[-1], min(left, COMMAND_S))
            messages.append({"role": "assistant", "content": reply})
            messages.append({"role": "user", "content": output})


def open_environment(name: str, options: Options) -> HarborFolder:
    """Open a folder of tasks. Raises ConfigError."""
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise ConfigError(
            f"harbor has no option {unknown[0]!r}: expected one of {', '.join(OPTIONS)}"
        )
    counts = {key: read_count(options, key, default) for key, default in OPTIONS.items()}
    folders = sorted(file.parent for file in Path(name).glob("*/task.toml"))
    if not folders:
        raise ConfigError(f"harbor takes a folder of task folders with task.toml; found {name!r}")
    tasks: dict[str, HarborTask] = {}
    reasons: list[str] = []
    for folder in folders:
        try:
            tasks[folder.name] = read_task(folder)
        except NeedsContainer as error:
            reasons.append(f"{folder.name}: {error}")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder.name} is not a Harbor task: {error}") from error
    if not tasks:
        raise ConfigError(
            f"all {len(folders)} tasks of {name!r} need a container, which is not started here "
            f"({reasons[0]}): run them with the command `harbor`, as a command after --"
        )
    if reasons:
        logger.warning(
            "%d of %d tasks of %r need a container and are left out, such as %s",
            *(len(reasons), len(folders), name, reasons[0]),
        )
    choose_sandbox("bubblewrap")  # raises ConfigError where it does not work
    return HarborFolder(tasks, counts)
