"""Commands in READMEs, pages and scripts: whet takes them, their programs exist."""

import argparse
import itertools
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from support.runs.commands import EXAMPLES, ROOT
from whet.app.cli.flags import AFTER, check_after, split_after
from whet.app.cli.main import build_parser

BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
CONTINUED = re.compile(r"\\\n\s*")
CLUSTER = EXAMPLES / "cluster"
SCRIPTS = [CLUSTER / "ray_job.sh", CLUSTER / "cluster.slurm"]
READMES = sorted(EXAMPLES.glob("*/README.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPERATORS = "&|;"


def relative(path: Path) -> str:
    return str(path.relative_to(EXAMPLES))


def relative_page(path: Path) -> str:
    return str(path.relative_to(ROOT))


def split_commands(shell: str) -> Iterator[list[str]]:
    """The words of each command of a script, without comments."""
    for line in CONTINUED.sub(" ", shell).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=OPERATORS)
        lexer.whitespace_split = True
        for operator, words in itertools.groupby(lexer, lambda word: not word.strip(OPERATORS)):
            if not operator:
                yield [*words]


def read_commands(shell: str, program: str) -> Iterator[list[str]]:
    """The arguments of each command of a program, wherever it stands in a command."""
    for words in split_commands(shell):
        for place, word in enumerate(words):
            if re.fullmatch(program, word) and not set(words[:place]) & {"pip", "echo"}:
                yield [*words[place + 1 :]]
                break


def check_whet(arguments: list[str]) -> None:
    """Parse a command line of whet as its `main` does. Raises ConfigError."""
    before, after = split_after(arguments)
    check_after(build_parser().parse_args(before, argparse.Namespace(**{AFTER: after})))


def check_programs(shell: str, *places: Path) -> None:
    """Check that the Python files that a script runs are in one of some folders, with its flags."""
    for program, *arguments in filter(None, read_commands(shell, r"(?:.*/)?python3?")):
        if program.endswith(".py"):
            found = [place / program for place in places if (place / program).is_file()]
            assert found, program
            sources = "".join(each.read_text() for each in found[0].parent.glob("*.py"))
            flags = [each.partition("=")[0] for each in arguments if each.startswith("--")]
            assert not [flag for flag in flags if f'"{flag}"' not in sources], (program, flags)


@pytest.mark.parametrize("readme", READMES, ids=relative)
def test_the_commands_of_a_readme_are_valid(readme: Path) -> None:
    shell = "\n".join(BLOCK.findall(readme.read_text()))
    for arguments in read_commands(shell, "whet"):
        check_whet(arguments)
    check_programs(shell, readme.parent, ROOT)


@pytest.mark.parametrize("page", PAGES, ids=relative_page)
def test_the_commands_of_a_page_are_valid(page: Path) -> None:
    for shell in BLOCK.findall(page.read_text()):
        for arguments in read_commands(shell, "whet"):
            assert "..." not in arguments, f"{arguments} cannot be pasted"
            check_whet(arguments)
        entered = [ROOT / folder for folder, *_ in read_commands(shell, "cd")]
        check_programs(shell, ROOT, *entered)


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
