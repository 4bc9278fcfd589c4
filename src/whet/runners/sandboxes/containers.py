"""Sandboxes by docker or podman: a container for each attempt, without a network of its own."""

import shutil
import subprocess
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

from anyio import CancelScope, run_process

from whet.errors import ConfigError
from whet.runners.executors.external_agents import build_environment
from whet.runners.sandboxes import relay
from whet.runners.sandboxes.sandbox import (
    SOCKET,
    Sandbox,
    SandboxedCommand,
    SandboxLimits,
    read_gateway_address,
    relay_gateway,
    relocate_gateway,
)
from whet.types import Endpoint

CHECK_TIMEOUT_S = 30.0


class ContainerSandbox(Sandbox):
    """A container of an image that has `python3`, which relays its calls to the gateway."""

    def __init__(self, program: str, image: str, limits: SandboxLimits) -> None:
        self._program = program
        self._image = image
        self._limits = limits

    def check(self) -> None:
        if shutil.which(self._program) is None:
            raise ConfigError(f"the sandbox {self._program} needs the program {self._program}")
        try:
            ended = subprocess.run(
                [self._program, "info"],
                capture_output=True,
                text=True,
                timeout=CHECK_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"{self._program} does not answer: is its daemon running?") from error
        if ended.returncode:
            last = ended.stderr.strip().splitlines()[-1:] or ["no reason"]
            raise ConfigError(f"{self._program} has no daemon to run containers: {last[0]}")

    @asynccontextmanager
    async def open(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], llm: Endpoint
    ) -> AsyncGenerator[SandboxedCommand]:
        name = f"whet-{uuid4().hex[:12]}"
        async with relay_gateway(folder / SOCKET, llm):
            try:
                command = self.build_command(name, arguments, folder, environment, llm)
                yield SandboxedCommand(command, folder, relocate_gateway(environment, llm))
            finally:
                with CancelScope(shield=True):  # the client's death does not end the container
                    await run_process([self._program, "rm", "--force", name], check=False)

    def build_command(
        self,
        name: str,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        llm: Endpoint,
    ) -> list[str]:
        """The command line that runs an attempt in a container of this name."""
        memory = f"{self._limits.memory_mb}m"
        _, port = read_gateway_address(llm)
        # No others: the runner may have keys of services in variables of such names.
        variables = [
            key for key in build_environment(llm, posts_rewards=True) if key in environment
        ]
        return [
            *(self._program, "run", "--rm", "--name", name, "--network", "none", "--init"),
            *("--memory", memory, "--memory-swap", memory),
            *("--pids-limit", str(self._limits.processes), "--read-only"),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--tmpfs", f"/work:rw,exec,size={self._limits.disk_mb}m", "--workdir", "/work"),
            *("--tmpfs", f"/tmp:rw,exec,size={self._limits.disk_mb}m"),
            *("--volume", f"{folder / SOCKET}:/whet/gateway.sock"),
            *("--volume", f"{folder / 'task.json'}:/whet/task.json:ro"),
            *("--volume", f"{relay.__file__}:/whet/relay.py:ro"),
            *(part for key in variables for part in ("--env", key)),  # values stay in our memory
            *("--env", "WHET_TASK_FILE=/whet/task.json", self._image),
            *("python3", "/whet/relay.py", "/whet/gateway.sock", str(port), *arguments),
        ]
