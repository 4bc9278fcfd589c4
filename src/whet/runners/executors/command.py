"""Agents that are commands, in any language: one process for each attempt."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import anyio
from pydantic import JsonValue

from whet.errors import AgentFailed, BadReward, ConfigError
from whet.runners.executors.external_agents import (
    HIDDEN_VARIABLES,
    build_environment,
    fetch_posted_rewards,
    get_last_reward,
    parse_reward,
)
from whet.runners.executors.process_groups import GroupWatch
from whet.runners.sandboxes import choose_sandbox
from whet.runners.sandboxes.sandbox import Sandbox
from whet.types import Endpoint

RewardBy = Literal["output", "exit", "post"]

TAIL_BYTES = 64 * 2**10
"""Bytes at the end of each stream that are kept."""
SHOWN_CHARS = 600
"""Characters of them in an error message."""
READ_BYTES = 2**16
DRAIN_TIMEOUT_S = 2.0
"""Seconds to read the streams of a command that has ended, if another process holds them open."""

HINTS = {
    "output": "end stdout with a line that is a number or has a JSON object with `reward`",
    "post": "post it to WHET_REWARD_URL with WHET_REWARD_KEY",
}


GROUPS = GroupWatch()
"""Of all commands of this process."""


class CommandAgent:
    """A command as an agent; see `command`."""

    def __init__(
        self, arguments: Sequence[str], reward: RewardBy, stdin: bool, sandbox: Sandbox | None
    ) -> None:
        self.__name__ = Path(arguments[0]).name
        self._arguments = tuple(arguments)
        self._reward: RewardBy = reward
        self._stdin = stdin
        self._sandbox = sandbox

    async def __call__(self, task: JsonValue, llm: Endpoint) -> float:
        """Run the command on a task and return its reward."""
        with TemporaryDirectory(prefix="whet-") as folder:
            file = Path(folder) / "task.json"
            file.write_text(json.dumps(task) + "\n")
            environment = {k: v for k, v in os.environ.items() if not HIDDEN_VARIABLES.fullmatch(k)}
            environment |= build_environment(llm, posts_rewards=self._reward == "post")
            environment["WHET_TASK_FILE"] = str(file)
            stdin = file if self._stdin else Path(os.devnull)
            if self._sandbox is None:
                result = await _run(self._arguments, stdin, environment)
            else:
                opened = self._sandbox.open(self._arguments, Path(folder), environment, llm)
                async with opened as sandboxed:
                    result = await _run(
                        sandboxed.arguments, stdin, sandboxed.environment, sandboxed.folder
                    )
        if self._reward == "exit" and result.code in (0, 1):
            return 1.0 - result.code
        if result.code != 0:
            raise AgentFailed(f"the command {result.exit_reason}; {result.last_output}")
        hint = f"{HINTS['post' if self._reward == 'post' else 'output']}; {result.last_output}"
        if self._reward == "post":
            return get_last_reward(await fetch_posted_rewards(llm), hint)
        printed = _parse_last_line(result.output)
        if printed is None:
            raise BadReward(f"no reward: {hint}")
        return printed


def command(
    arguments: Sequence[str],
    *,
    reward: RewardBy = "output",
    stdin: bool = False,
    sandbox: str | None = None,
) -> CommandAgent:
    """Make an agent of a command such as `["node", "agent.js"]`, run once for each attempt.

    It finds its model in `OPENAI_BASE_URL`, `OPENAI_API_KEY` and the like, and its task as JSON in
    the file that `WHET_TASK_FILE` names, with `stdin` also on stdin. The last line it prints is its
    reward: a number, or a JSON object with `reward`. By `exit`, exit code 0 is a reward of 1 and
    exit code 1 a reward of 0. By `post`, it posts `{"value": ...}` to `WHET_REWARD_URL` with
    `WHET_REWARD_KEY`. Other exit codes are failures.

    A `sandbox` runs each attempt in a folder of its own with limits: `subprocess`, `bubblewrap`,
    `docker:IMAGE` or `podman:IMAGE`, and after commas `memory_mb=N`, `processes=N`, `disk_mb=N`.

    Raises:
        ConfigError: the command does not exist, or this system cannot run the sandbox.
    """
    if not arguments or isinstance(arguments, str):
        raise ConfigError(f"a command is a list such as ['node', 'agent.js']; found {arguments!r}")
    is_in_image = sandbox is not None and sandbox.startswith(("docker:", "podman:"))
    if not is_in_image and shutil.which(arguments[0]) is None:
        hint = ", did you mean it without the quotes?" if " " in arguments[0] else ""
        raise ConfigError(f"command not found: {arguments[0]!r}{hint}")
    chosen = None if sandbox is None else choose_sandbox(sandbox)
    return CommandAgent(arguments, reward, stdin, chosen)


class _StreamTail:
    """The last bytes of a stream.

    The pipe is our own: asyncio's `wait` does not return while a child process holds the streams.
    """

    def __init__(self) -> None:
        read_end, write_end = os.pipe()
        self._read_end = os.fdopen(read_end, "rb")
        self.write_end = os.fdopen(write_end, "wb")
        self._kept = b""

    async def read(self) -> None:
        """Read until every process has closed the other end."""
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), self._read_end
        )
        try:
            while chunk := await stream.read(READ_BYTES):
                self._kept = (self._kept + chunk)[-TAIL_BYTES:]
        finally:
            transport.close()

    def close(self) -> None:
        """Close both ends: a command that did not start leaves them open."""
        self.write_end.close()
        self._read_end.close()

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace")


class _CommandResult:
    """Exit code of a command and the last of its output."""

    def __init__(self, code: int, output: str, errors: str) -> None:
        self.code = code
        self.output = output
        self._errors = errors

    @property
    def exit_reason(self) -> str:
        if self.code >= 0:
            return f"exited with code {self.code}"
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"was killed by signal {-self.code}"

    @property
    def last_output(self) -> str:
        """The last of stderr in one line, or of stdout if stderr is empty."""
        text = " ".join((self._errors.strip() or self.output.strip()).split())
        return f"last output: {text[-SHOWN_CHARS:]}" if text else "it printed nothing"


async def _run(
    arguments: Sequence[str],
    stdin: Path,
    environment: Mapping[str, str],
    folder: Path | None = None,
) -> _CommandResult:
    """Run a command; when this returns or is canceled, all its processes are gone."""
    output, errors = _StreamTail(), _StreamTail()
    reading = [asyncio.create_task(tail.read()) for tail in (output, errors)]
    process = None
    try:
        process = await _start(arguments, stdin, environment, output, errors, folder)
        with GROUPS.watch(process.pid):  # a child that outlives it would hold the streams open
            code = await process.wait()
        await asyncio.wait(reading, timeout=DRAIN_TIMEOUT_S)
        return _CommandResult(code, output.text, errors.text)
    finally:
        with anyio.CancelScope(shield=True):
            if process is not None:
                await process.wait()
            for each in reading:
                each.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
            output.close()
            errors.close()


async def _start(
    arguments: Sequence[str],
    stdin: Path,
    environment: Mapping[str, str],
    output: _StreamTail,
    errors: _StreamTail,
    folder: Path | None,
) -> asyncio.subprocess.Process:
    with stdin.open("rb") as source:
        try:
            return await asyncio.create_subprocess_exec(
                *arguments,
                stdin=source,
                stdout=output.write_end,
                stderr=errors.write_end,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise AgentFailed(f"cannot start the command {arguments[0]!r}: {error}") from error
        finally:
            output.write_end.close()
            errors.write_end.close()


def _parse_last_line(output: str) -> float | None:
    """Return the reward in the last line of the output, if there is one. Raises BadReward."""
    try:
        return parse_reward(json.loads(output.rstrip().rpartition("\n")[2]))
    except ValueError:
        return None
