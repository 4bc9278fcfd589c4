"""The folder of one attempt at a Harbor task, and its commands, in namespaces of bubblewrap."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import cast

from whet.errors import AgentFailed
from whet.runners.environments.harbor_tasks import HarborTask
from whet.runners.sandboxes.control_groups import open_groups
from whet.runners.sandboxes.local import build_launcher, build_limits, measure_folder
from whet.runners.sandboxes.sandbox import SandboxLimits

LINKS = ("bin", "lib", "lib32", "lib64", "sbin")
"""Folders of a merged /usr."""
SHOWN_BYTES = 4000
"""Bytes at the end of a command's output that the model sees."""


class HarborSandbox:
    """Working directory, logs and commands of one attempt.

    Commands see the programs of this machine, read-only, their working directory and an empty
    `/tmp`, and have no network. `/tests` and `/logs` are there in `verify` only.
    """

    def __init__(self, task: HarborTask, folder: Path, limits: SandboxLimits) -> None:
        self._task = task
        self._limits = limits
        self._folder = folder
        self._work, self._logs = folder / "work", folder / "logs"

    def prepare(self) -> None:
        """Copy the files of the task into its working directory."""
        self._work.mkdir()
        for source, target in self._task.copies:
            into = self._work / target
            into.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, into, dirs_exist_ok=True)
            else:
                shutil.copy2(source, into)

    def run(self, script: str, timeout_s: float) -> str:
        """Run a script of the model; return the end of what it printed, and its exit code.

        Raises AgentFailed if it filled the disk.
        """
        code, output = self._execute(["sh", "-c", script], [], timeout_s)
        if measure_folder(self._folder) > self._limits.disk_mb * 2**20:
            raise AgentFailed(f"the command wrote more than {self._limits.disk_mb} MB")
        ended = f"it took more than {timeout_s:.0f} s" if code is None else f"exit code {code}"
        return f"{output}\n({ended})".lstrip()

    def verify(self) -> float:
        """Run the tests and return their reward. Raises AgentFailed if they write none."""
        tests = self._task.folder.absolute() / "tests"
        (self._logs / "verifier").mkdir(parents=True)
        binds = ["--ro-bind", str(tests), "/tests", "--bind", str(self._logs), "/logs"]
        code, output = self._execute(["bash", "/tests/test.sh"], binds, self._task.verifier_s)
        reward = _read_reward(self._logs / "verifier")
        if reward is None:
            last = (output.strip().splitlines() or ["they printed nothing"])[-1]
            raise AgentFailed(f"the tests wrote no reward (exit code {code}): {last[:200]}")
        return reward

    def _execute(
        self, arguments: list[str], binds: list[str], timeout_s: float
    ) -> tuple[int | None, str]:
        with (
            open_groups(self._limits) as groups,
            (self._folder / "output").open("w+b") as output,
        ):
            limits = build_limits(self._limits, groups)
            limits["RLIMIT_FSIZE"] = self._limits.disk_mb * 2**20
            launcher = build_launcher(groups, limits, self._folder)
            process = subprocess.Popen(
                [*launcher, *self._build_namespaces(binds), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/tmp"},
                start_new_session=True,
            )
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            size = output.seek(0, os.SEEK_END)
            output.seek(max(0, size - SHOWN_BYTES))
            return code, output.read().decode(errors="replace")

    def _build_namespaces(self, binds: list[str]) -> list[str]:
        workdir = str(self._task.workdir)
        links = [name for name in LINKS if Path("/", name).is_symlink()]
        return [
            *("bwrap", "--unshare-all", "--die-with-parent", "--new-session"),
            *("--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc"),
            *(part for name in links for part in ("--symlink", f"usr/{name}", f"/{name}")),
            *("--dev", "/dev", "--proc", "/proc", "--size", str(self._limits.disk_mb * 2**20)),
            *("--tmpfs", "/tmp", "--bind", str(self._work), workdir, *binds),
            *(part for pair in self._task.variables.items() for part in ("--setenv", *pair)),
            *("--chdir", workdir, "--"),
        ]


def _read_reward(folder: Path) -> float | None:
    """The reward that the tests wrote: a number, or JSON with `reward` or one single number."""
    for name in ("reward.txt", "reward.json"):
        file = folder / name
        if folder.is_symlink() or file.is_symlink() or not file.is_file():
            continue  # a link of the model's code may lead anywhere
        try:
            value = json.loads(file.read_text())
        except ValueError:
            raise AgentFailed(f"the tests wrote no number to {name}") from None
        if isinstance(value, dict):
            rewards = cast(dict[str, object], value)
            value = rewards.get("reward", next(iter(rewards.values()), None))
        if isinstance(value, int | float):
            return float(value)
        raise AgentFailed(f"the tests wrote no number to {name}")
    return None
