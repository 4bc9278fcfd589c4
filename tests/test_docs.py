"""The documentation is complete and true: every key, every command, every program in it."""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from whet.algorithms import READ_BY
from whet.app.cli import build_parser
from whet.app.flags import PREFIX, config_leaves

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
CONFIGURATION = (DOCS / "configuration.md").read_text()
PROGRAM = re.compile(r"```python (\S+)\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its commands."""
    yield parser
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage] - there is no other way
        if isinstance(action, argparse._SubParsersAction):  # pyright: ignore[reportPrivateUsage]
            for below in action.choices.values():
                yield from commands(below)


def test_every_key_is_documented_with_its_default_and_meaning() -> None:
    # `python scripts/document_config.py` writes the tables anew.
    for key, field in config_leaves():
        default = "" if field.default is None else f"`{field.default}`"
        assert field.description, f"{key} has no docstring"
        meaning = " ".join(field.description.split())
        assert f"| `{key}` | {default} | {meaning} |" in CONFIGURATION


def test_no_key_is_documented_that_does_not_exist() -> None:
    documented = re.findall(r"^\| `([a-z0-9_.]+)` \|", CONFIGURATION, re.MULTILINE)
    assert documented == [key for key, _ in config_leaves()]


@pytest.mark.parametrize("parser", [*commands(build_parser())], ids=lambda parser: parser.prog)
def test_every_command_and_flag_is_documented(parser: argparse.ArgumentParser) -> None:
    assert f"`{parser.prog}" in CONFIGURATION
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage]
        if not action.dest.startswith(PREFIX):
            for flag in set(action.option_strings) - {"-h", "--help"}:
                assert f"`{flag}" in CONFIGURATION


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


def test_decisions_are_numbered_and_say_what_would_change_them() -> None:
    files = sorted((DOCS / "decisions").glob("*.md"))
    assert len({int(file.name[:3]) for file in files}) == len(files)
    for file in files:
        text = file.read_text()
        assert text.startswith(f"# {file.name[:3]}: ")
        for part in ("Question", "Choice", "Why", "What would change our mind"):
            assert f"**{part}.**" in text, f"{file.name} has no {part}"


def run(program: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.slow
def test_the_programs_of_the_quickstart_run_as_printed(tmp_path: Path) -> None:
    programs = dict(PROGRAM.findall((DOCS / "quickstart.md").read_text()))
    assert set(programs) == {"agent.py", "train.py"}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
    done = run("train.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("last step: ")
    assert (tmp_path / ".whet" / "runs" / "even" / "report.json").exists()


@pytest.mark.slow
def test_the_blocks_on_agents_as_code_are_one_program_that_runs(tmp_path: Path) -> None:
    page = (DOCS / "agents-as-code.md").read_text()
    agent, hooks, training = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    large = 'model="smollm2", steps=30'
    assert large in training
    small = "steps=1, tasks_per_step=2, group_size=2, hooks=[Sandboxes()]"
    tasks = 'train = test = [{"question": "What is 2 + 3?", "answer": "5"}] * 2\n'
    (tmp_path / "program.py").write_text(agent + hooks + tasks + training.replace(large, small))
    done = run("program.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "held-out accuracy" in done.stdout


def test_the_first_screen_shows_the_first_example_in_twelve_lines() -> None:
    program = (ROOT / "examples" / "first.py").read_text()
    assert f"```python\n{program}```" in (ROOT / "README.md").read_text()
    assert len([line for line in program.splitlines() if line]) <= 12


@pytest.mark.slow
def test_the_program_of_the_first_screen_runs_as_printed(tmp_path: Path) -> None:
    done = run(ROOT / "examples" / "first.py", tmp_path)
    assert done.returncode == 0, done.stderr
    base, trained = re.findall(r"greedy +│ +([\d.]+)% │ +([\d.]+)%", done.stdout)[0]
    assert float(trained) - float(base) >= 30


def test_the_page_on_algorithms_shows_the_example_and_names_every_algorithm() -> None:
    page = (DOCS / "algorithms.md").read_text()
    [shown] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert shown in (ROOT / "examples" / "own_algorithm.py").read_text()
    assert all(f"| `{name}` |" in page for name in READ_BY)
