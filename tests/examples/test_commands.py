"""Commands in the READMEs and scripts of the examples: whet takes them, their programs exist."""

import argparse
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from support.commands import EXAMPLES, ROOT
from whet.app.cli.flags import AFTER, check_after, split_after
from whet.app.cli.main import build_parser

BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
CONTINUED = re.compile(r"\\\n\s*")
CLUSTER = EXAMPLES / "cluster"
SCRIPTS = [CLUSTER / "ray_job.sh", CLUSTER / "cluster.slurm"]
READMES = sorted(EXAMPLES.glob("*/README.md"))


def relative(path: Path) -> str:
    return str(path.relative_to(EXAMPLES))


def read_commands(shell: str, program: str) -> Iterator[list[str]]:
    """The arguments of each command of a program, wherever it stands in a line."""
    for line in CONTINUED.sub(" ", shell).splitlines():
        words = shlex.split(line, comments=True)
        for place, word in enumerate(words):
            if re.fullmatch(program, word) and not set(words[:place]) & {"pip", "echo"}:
                yield [*words[place + 1 :]]
                break


def check_whet(arguments: list[str]) -> None:
    """Parse a command line of whet as its `main` does. Raises ConfigError."""
    if arguments[-1:] == ["&"]:
        arguments = arguments[:-1]
    before, after = split_after(arguments)
    check_after(build_parser().parse_args(before, argparse.Namespace(**{AFTER: after})))


@pytest.mark.parametrize("readme", READMES, ids=relative)
def test_the_commands_of_a_readme_are_valid(readme: Path) -> None:
    shell = "\n".join(BLOCK.findall(readme.read_text()))
    for arguments in read_commands(shell, "whet"):
        check_whet(arguments)
    for program, *_ in read_commands(shell, r"(?:.*/)?python3?"):
        if program.endswith(".py"):
            assert any((place / program).is_file() for place in (readme.parent, ROOT)), program


@pytest.mark.parametrize("script", SCRIPTS, ids=relative)
def test_the_scripts_of_a_cluster_are_valid(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    found = [*read_commands(script.read_text(), "whet")]
    assert {arguments[0] for arguments in found} == {"store", "serve", "runner", "train"}
    for arguments in found:
        check_whet(arguments)


def test_the_containers_of_a_cluster_run_valid_commands() -> None:
    services = yaml.safe_load((CLUSTER / "compose.yaml").read_text())["services"]
    commands = [each["command"].split() for name, each in services.items() if name != "database"]
    assert {command[1] for command in commands} == {"serve", "runner", "train"}
    for whet, *arguments in commands:
        assert whet == "whet"
        check_whet(arguments)
