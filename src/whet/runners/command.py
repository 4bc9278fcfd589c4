"""Agents that are commands, in any language: a process for each attempt."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import anyio
from anyio import to_thread
from pydantic import JsonValue

from whet.errors import AgentFailed, ConfigError
from whet.runners.attempt import SECRETS, environment_of, last_reward, read_posted, reward_in
from whet.types import Endpoint

RewardBy = Literal["output", "exit"]

KEPT = 64 * 2**10
"""Bytes of each stream that are kept: its end."""
SHOWN = 600
"""Characters of them in a failure."""
PIECE = 2**16
LEFT_OPEN_S = 2.0
"""How long the streams of a command that has ended are read, if another process holds them."""

HINT = (
    "end stdout with a line that is a number or has a JSON object with `reward`, "
    "or post it to WHET_REWARD_URL"
)


class Command:
    """An agent that is a command; see `command`."""

    def __init__(self, arguments: Sequence[str], reward: RewardBy) -> None:
        self.__name__ = Path(arguments[0]).name
        self._arguments = tuple(arguments)
        self._reward = reward

    async def __call__(self, task: JsonValue, llm: Endpoint) -> float:
        """Run it on a task, and say what it earned."""
        with TemporaryDirectory(prefix="whet-") as folder:
            file = Path(folder) / "task.json"
            file.write_text(json.dumps(task) + "\n")
            environment = {k: v for k, v in os.environ.items() if k not in SECRETS}
            environment |= environment_of(llm) | {"WHET_TASK_FILE": str(file)}
            ended = await _run(self._arguments, file, environment)
        if self._reward == "exit" and ended.code in (0, 1):
            return 1.0 - ended.code
        if ended.code != 0:
            raise AgentFailed(f"the command {ended.how}{ended.said}")
        printed = _printed(ended.output)
        if printed is not None:
            return printed
        return last_reward(await to_thread.run_sync(read_posted, llm), HINT + ended.said)


def command(arguments: Sequence[str], *, reward: RewardBy = "output") -> Command:
    """A command as an agent, such as `["node", "agent.js"]`: run once for each attempt.

    It finds its model in `OPENAI_BASE_URL`, `OPENAI_API_KEY` and the like, its task as JSON on
    stdin and in the file that `WHET_TASK_FILE` names. The last line it prints is its reward: a
    number, or a JSON object with `reward`; or it posts `{"value": ...}` to `WHET_REWARD_URL`. By
    `exit`, 0 is a reward of 1 and 1 is one of 0. Any other exit is a failure.

    Raises:
        ConfigError: there is no such command.
    """
    if not arguments or isinstance(arguments, str):
        raise ConfigError(f"a command is a list such as ['node', 'agent.js']; found {arguments!r}")
    if shutil.which(arguments[0]) is None:
        raise ConfigError(f"there is no command {arguments[0]!r} that can be run from here")
    return Command(arguments, reward)


class _Tail:
    """The end of what a stream said.

    The pipe is our own: `asyncio` takes a process whose streams another holds for one that runs.
    """

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        self._kept = b""

    async def read(self) -> None:
        """Read until all that hold the other end have closed it."""
        stream = asyncio.StreamReader()
        source = os.fdopen(self._read_end, "rb")
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), source
        )
        try:
            while piece := await stream.read(PIECE):
                self._kept = (self._kept + piece)[-KEPT:]
        finally:
            transport.close()

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace")


class _Ended:
    """How a command ended, and the end of what it said."""

    def __init__(self, code: int, output: str, errors: str) -> None:
        self.code = code
        self.output = output
        self._errors = errors

    @property
    def how(self) -> str:
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-self.code).name}"
        return f"was ended by signal {-self.code}"

    @property
    def said(self) -> str:
        """What it said last, in one line; errors if it had any."""
        said = " ".join((self._errors.strip() or self.output.strip()).split())
        return f"; it said: {said[-SHOWN:]}" if said else "; it said nothing"


async def _run(arguments: Sequence[str], task: Path, environment: dict[str, str]) -> _Ended:
    """A command and all it started, gone when this returns or is cancelled."""
    output, errors = _Tail(), _Tail()
    reading = [asyncio.create_task(tail.read()) for tail in (output, errors)]
    process = None
    try:
        process = await _start(arguments, task, environment, output, errors)
        code = await process.wait()
        _kill_group(process.pid)  # a child that outlives it would hold its streams open
        await asyncio.wait(reading, timeout=LEFT_OPEN_S)
        return _Ended(code, output.text, errors.text)
    finally:
        with anyio.CancelScope(shield=True):
            if process is not None:
                _kill_group(process.pid)
                await process.wait()
            for each in reading:
                each.cancel()
            await asyncio.gather(*reading, return_exceptions=True)


async def _start(
    arguments: Sequence[str], task: Path, environment: dict[str, str], output: _Tail, errors: _Tail
) -> asyncio.subprocess.Process:
    with task.open("rb") as stdin:
        try:
            return await asyncio.create_subprocess_exec(
                *arguments,
                stdin=stdin,
                stdout=output.write_end,
                stderr=errors.write_end,
                env=environment,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise AgentFailed(f"the command {arguments[0]!r} cannot be started: {error}") from error
        finally:
            os.close(output.write_end)
            os.close(errors.write_end)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _printed(output: str) -> float | None:
    """The reward that the last line says, if it says one. Raises BadReward."""
    try:
        return reward_in(json.loads(output.rstrip().rpartition("\n")[2]))
    except ValueError:
        return None
