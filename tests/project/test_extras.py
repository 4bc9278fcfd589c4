"""Each extra, installed alone, brings what its features import, and a missing one is named.

`local` is not among them: torch takes minutes, and the environment of these tests has it.
"""

import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from support.scripts import load_script

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {
    "runner": ["whet.runners.runner", "whet.store.http.client"],
    "gateway": [
        "whet.gateway.app",
        "whet.store.http.server",
        "whet.engines.remote.engine",
        "whet.app.evaluation.comparison",
        "matplotlib.figure",
    ],
    "postgres": ["whet.store.postgres"],
    "ray": ["whet.runners.ray_pool", "ray"],
    "tinker": ["whet.models.tinker", "whet.trainers.tinker"],
    "tracking": [
        "whet.training.tracking.tensorboard",
        "whet.training.tracking.wandb",
        "whet.training.tracking.mlflow",
    ],
    "otel": ["whet.runners.tracers.otel"],
    "prompts": ["whet.app.prompts.gepa", "gepa.api"],
}
"""Modules that can be imported with nothing but the extra."""
COMMANDS = {
    "runner": ["runner"],
    "gateway": ["store", "serve", "eval", "runner", "rollouts", "show", "view", "rescore"],
    "tinker": ["serve"],
    "prompts": ["optimize-prompt"],
}
"""Commands that start with nothing but the extra."""
NEEDED = {
    "runner agent.py:solve --store http://127.0.0.1:9": "runner",
    "runner agent.py:solve --store postgresql://127.0.0.1:9/none": "postgres",
    "runner agent.py:solve --tracer otel": "otel",
    "store": "gateway",
    "eval agent.py:solve --tasks tasks.jsonl --model tiny": "gateway",
    "train agent.py:solve --tasks tasks.jsonl": "local",
    "demo": "local",
}
"""The extra that a command asks for where none is installed."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    [built] = folder.glob("whet-*.whl")
    return str(built)


@pytest.mark.parametrize("extra", MODULES)
def test_an_extra_alone_is_enough(extra: str, wheel: str, tmp_path: Path) -> None:
    python = install(tmp_path, f"{wheel}[{extra}]")
    imported = run(python, "-c", f"import {', '.join(MODULES[extra])}")
    assert imported.returncode == 0, imported.stderr
    for command in COMMANDS.get(extra, []):
        done = run(python, "-m", "whet", command, "--help")
        assert done.returncode == 0, done.stderr
        assert f"usage: whet {command}" in done.stdout
    assert run(python, "-c", "import torch").returncode == 1, "torch is for `local` only"
    check_documented_size(extra, tmp_path / "venv")


def test_a_command_without_its_extra_names_it_in_one_line(wheel: str, tmp_path: Path) -> None:
    python = install(tmp_path, wheel)
    (tmp_path / "agent.py").write_text("def solve(task, llm):\n    return 1.0\n")
    (tmp_path / "tasks.jsonl").write_text("1\n")
    for command, extra in NEEDED.items():
        done = run(python, "-m", "whet", *command.split())
        assert done.returncode == 2, command
        [line] = done.stderr.splitlines()
        assert line.endswith(f"in a clone of whet: pip install -e '.[{extra}]'"), command
    check_documented_size("none", tmp_path / "venv")


@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_the_pinned_packages_are_there_for_the_first_release_of_each_python(minor: int) -> None:
    version = f"3.{minor}"
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "pyproject.toml"]
    flags = ["--extra", "dev", "--python-version", f"{version}.0", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, *flags, "-c", "constraints.txt", "-o", "/dev/null"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr


def test_every_extra_that_an_error_names_exists() -> None:
    sources = "".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    named = ",".join(re.findall(r'requires_extra\(.+, "([a-z,]+)"\)', sources)).split(",")
    assert len(named) > 10
    assert {*named} <= {*PROJECT["optional-dependencies"]}
    assert {*MODULES, "local", "dev"} == {*PROJECT["optional-dependencies"]}


def check_documented_size(extra: str, environment: Path) -> None:
    """Compare packages and megabytes with the extra's row in the quickstart."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    row = re.search(rf"^\| `?{extra}`? \|.*\| (\d+) \| (\d+) \| \d+ \|$", page, re.MULTILINE)
    assert row, f"the quickstart has no row for {extra}"
    # Some packages are for some versions of Python only.
    assert load_script("measure_installs").measure(environment) == (
        pytest.approx(int(row[1]), abs=3),
        pytest.approx(int(row[2]), rel=0.1),
    ), f"`python scripts/measure_installs.py {extra}` prints its row"


def install(folder: Path, wanted: str) -> Path:
    """Install a requirement into a new environment in the folder."""
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    constraints = str(ROOT / "constraints.txt")
    pip("--python", str(python), "install", "--no-compile", "-c", constraints, wanted)
    return python


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=python.parents[2],
        env={"PATH": "/usr/bin:/bin", "WHET_STORE_TOKEN": "token"},  # no PYTHONPATH to the sources
    )
