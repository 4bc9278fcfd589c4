"""Harbor tasks, read from their folders, and the requirements of their Dockerfiles."""

import re
import shlex
import tomllib
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

Copies = list[tuple[Path, PurePosixPath]]
"""Files of a task, and where they belong below its working directory."""

WORKDIR = PurePosixPath("/app")
TAKEN = ("bin", "dev", "etc", "lib", "lib64", "logs", "proc", "sbin", "tests", "tmp", "usr")
"""Folders of the sandbox itself."""
CONTINUED = re.compile(r"\\\s*\n")


class NeedsContainer(Exception):
    """A task that only a container can run; the text says why."""


@dataclass(slots=True)
class HarborTask:
    """A task: its instruction, files, variables and time limits."""

    folder: Path
    workdir: PurePosixPath = WORKDIR
    copies: Copies = field(default_factory=Copies)
    variables: dict[str, str] = field(default_factory=dict[str, str])
    agent_s: float = 600.0
    verifier_s: float = 600.0

    @property
    def instruction(self) -> str:
        return (self.folder / "instruction.md").read_text()


def read_task(folder: Path) -> HarborTask:
    """Read a task. Raises NeedsContainer, or ValueError and OSError if it is not one."""
    settings = tomllib.loads((folder / "task.toml").read_text())
    task = HarborTask(folder)
    task.agent_s = _read_timeout(settings, "agent", task.agent_s)
    task.verifier_s = _read_timeout(settings, "verifier", task.verifier_s)
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise ValueError(f"the task {folder.name!r} has no {name}")
    context = folder / "environment"
    if any(context.glob("docker-compose.y*ml")):
        raise NeedsContainer("it has several services")
    if not (context / "Dockerfile").is_file():
        raise NeedsContainer("it has no Dockerfile")
    _read_dockerfile(task, context, (context / "Dockerfile").read_text())
    return task


def _read_timeout(settings: dict[str, Any], section: str, default: float) -> float:
    value = settings.get(section, {}).get("timeout_sec", default)
    if not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"timeout_sec of [{section}] is a positive number; found {value!r}")
    return float(value)


def _read_dockerfile(task: HarborTask, context: Path, text: str) -> None:
    lines = [line.strip() for line in CONTINUED.sub(" ", text).splitlines()]
    images = 0
    for line in lines:
        if not line or line.startswith("#"):
            continue
        try:
            name, *words = shlex.split(line)
        except ValueError:  # a script of the shell, with an apostrophe in a comment
            name, *words = line.split()
        match name.upper(), words:
            case "FROM", [_]:
                images += 1
            case "WORKDIR", [destination]:
                task.workdir = _check_workdir(destination)
            case "ENV", [*pairs] if all("=" in pair for pair in pairs):
                task.variables |= dict(pair.split("=", 1) for pair in pairs)
            case "COPY", [*sources, destination] if sources and not sources[0].startswith("--"):
                task.copies += _read_copies(task.workdir, context, sources, destination)
            case other, _:
                raise NeedsContainer(f"its Dockerfile has {other} {' '.join(words)[:40]}".strip())
    if images != 1:
        raise NeedsContainer(f"its Dockerfile has {images} images")


def _check_workdir(destination: str) -> PurePosixPath:
    path = PurePosixPath(destination)
    if not path.is_absolute() or ".." in path.parts or (path.parts[1:2] or TAKEN)[0] in TAKEN:
        raise NeedsContainer(f"its working directory is {destination}")
    return path


def _read_copies(
    workdir: PurePosixPath, context: Path, sources: list[str], destination: str
) -> Copies:
    target = workdir / destination
    if ".." in target.parts or not target.is_relative_to(workdir):
        raise NeedsContainer(f"it copies files to {destination}")
    copies: Copies = []
    for source in sources:
        path = (context / source).resolve()
        if not path.is_relative_to(context.resolve()) or not path.exists():
            raise NeedsContainer(f"it copies {source}")
        is_folder = (
            destination.endswith("/") or destination == "." or target == workdir or len(sources) > 1
        )
        into = target / path.name if path.is_file() and is_folder else target
        copies.append((path, into.relative_to(workdir)))
    return copies
