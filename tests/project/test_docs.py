"""The documentation is complete and true: every key, every command, every program in it."""

import argparse
import ast
import builtins
import re
import subprocess
import symtable
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.scripts import load_script
from whet.algorithms import READ_BY
from whet.app.cli.config_flags import list_config_fields
from whet.app.cli.flags import PREFIX, CommandParser
from whet.app.cli.main import build_parser
from whet.app.run_folder import MAY_CHANGE
from whet.gateway.app import DIALECTS
from whet.gateway.http import ERRORS
from whet.store.http.rpc import METHODS
from whet.training.step import PHASES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("examples/*/README.md")])
WITH_PROGRAMS = [  # each program of the page on SDKs is a link
    page for page in PAGES if page.parent.name != "reference" and page.name != "sdks.md"
]
CONFIGURATION = (DOCS / "reference" / "configuration.md").read_text()
COMMANDS = (DOCS / "reference" / "cli.md").read_text()
METRIC_FUNCTIONS = {
    "training/step_metrics.py": {
        "compute_reward_metrics",
        "compute_row_metrics",
        "count_left_out",
    },
    "training/step.py": {"_run_updates"},
    "trainers/local.py": {"_measure"},
    "trainers/tinker.py": {"_compute_metrics"},
}
MODEL_CALLS = [dialect.path for dialect in DIALECTS]
SNIPPET = re.compile(r"```python(?: \S+)?\n(.*?)```", re.DOTALL)  # fragments are marked `py`
PROGRAM = re.compile(r"```python (\S+)\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its commands."""
    if isinstance(parser, CommandParser):
        parser.load()
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from commands(below)


def test_every_key_is_documented_with_its_default_and_meaning() -> None:
    # `python scripts/document_config.py` writes the tables again.
    for key, field in list_config_fields():
        default = "" if field.default is None else f"`{field.default}`"
        assert field.description, f"{key} has no docstring"
        meaning = " ".join(field.description.split())
        assert f"| `{key}` | {default} | {meaning} |" in CONFIGURATION


def test_no_key_is_documented_that_does_not_exist() -> None:
    documented = re.findall(r"^\| `([a-z0-9_.]+)` \|", CONFIGURATION, re.MULTILINE)
    assert documented == [key for key, _ in list_config_fields()]


def test_keys_that_may_change_on_resume_are_listed() -> None:
    listed = CONFIGURATION.partition("a resumed run keeps it:")[2].partition("may change")[0]
    assert set(re.findall(r"`([a-z0-9_.]+)`", listed)) == MAY_CHANGE


@pytest.mark.parametrize("parser", [*commands(build_parser())], ids=lambda parser: parser.prog)
def test_every_command_and_flag_is_documented(parser: argparse.ArgumentParser) -> None:
    _, found, below = COMMANDS.partition(f"\n## `{parser.prog}`\n")
    assert found, "run scripts/document_reference.py"
    text = below.partition("\n## ")[0]
    for action in parser._actions:
        if not action.dest.startswith(PREFIX) and action.help != argparse.SUPPRESS:
            assert all(flag in text for flag in action.option_strings)


def find_anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = HEADING.findall(FENCED.sub("", page.read_text()))
    return {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        found = page.parent / target if target else page
        assert found.exists(), target
        if anchor:
            found = found / "README.md" if found.is_dir() else found
            assert anchor in find_anchors(found), f"{target}#{anchor}"


def find_undefined(source: str) -> set[str]:
    """The names that a program reads and neither defines nor imports."""
    module = symtable.symtable(source, "page", "exec")
    tables, read = [module], set[str]()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        read |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (table is module or symbol.is_global())
        }
    known = {s.get_name() for s in module.get_symbols() if s.is_assigned() or s.is_imported()}
    return read - known - set(dir(builtins))


@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_programs_of_a_page_import_what_they_use(page: Path) -> None:
    # What the page has defined above counts: its blocks are pasted one after the other.
    assert find_undefined("\n".join(SNIPPET.findall(page.read_text()))) == set()


def test_the_index_leads_to_every_page() -> None:
    index = (DOCS / "index.md").read_text()
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    records = {page for page in pages if page.startswith("decisions/0")}
    assert pages - records - {"index.md"} - {target for target, _ in LINK.findall(index)} == set()


@pytest.mark.parametrize("page", ["python-api.md", "cli.md"])
def test_generated_pages_are_up_to_date(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # `python scripts/document_reference.py` writes them again.
    monkeypatch.setenv("COLUMNS", "80")  # restored after the test: the script sets its own
    written = (DOCS / "reference" / page).read_text()
    assert written == load_script("document_reference").PAGES[page]()


def test_every_metric_of_a_step_is_documented() -> None:
    page = (DOCS / "reference" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `([a-z_]+)` \|", page, re.MULTILINE))
    logged = {f"{phase}_seconds" for phase in (*PHASES, "step")} | {"grad_norm", "learning_rate"}
    for file, functions in METRIC_FUNCTIONS.items():
        for node in ast.walk(ast.parse((ROOT / "src" / "whet" / file).read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in functions:
                dicts = [d for d in ast.walk(node) if isinstance(d, ast.Dict)]
                keys = [key for each in dicts for key in each.keys]
                logged |= {str(key.value) for key in keys if isinstance(key, ast.Constant)}
    assert logged - {"reward/"} == documented - {
        *("computed_tokens", "corrected_fraction", "reference_kl")
    }


def test_every_path_and_error_of_the_gateway_is_documented() -> None:
    page = (DOCS / "reference" / "http-api.md").read_text()
    source = (ROOT / "src" / "whet" / "gateway" / "app.py").read_text()
    paths = [path.replace(":path", "") for path in re.findall(r'build_route\("(/.+?)"', source)]
    assert len(paths) > 5
    assert [path for path in (*paths, *MODEL_CALLS) if f" {path}`" not in page] == []
    assert [code for _, _, code in ERRORS if f"`{code}`" not in page] == []


def test_every_operation_of_the_store_is_documented() -> None:
    page = (DOCS / "guides" / "scaling" / "store.md").read_text()
    run = "/v1/runs/{run}"
    paths = {method.path for method in METHODS.values()} - {run}  # the page has it in words
    for path in paths:
        shown = re.sub(r"{(rollout|attempt)}", "{id}", path.removeprefix(f"{run}/"))
        assert re.search(rf"[` ]{re.escape(shown)}`", page), shown


def test_decisions_are_numbered_dated_and_listed() -> None:
    files = sorted((DOCS / "decisions").glob("0*.md"))
    index = (DOCS / "decisions" / "index.md").read_text()
    assert [int(file.name[:4]) for file in files] == list(range(1, len(files) + 1))
    for file in files:
        text = file.read_text()
        title = re.match(rf"# {file.name[:4]}: (.+)\n\nStatus: accepted, 2\d\d\d-\d\d-\d\d\n", text)
        assert title, f"{file.name} has no title, status and date"
        assert f"| [{file.name[:4]}]({file.name}) | {title[1]} |" in index
        for part in ("Question", "Choice", "Why", "What would change our mind"):
            assert f"**{part}.**" in text, f"{file.name} has no {part}"


def test_files_named_in_decisions_and_internals_exist() -> None:
    for file in [*(DOCS / "decisions").glob("0*.md"), *(DOCS / "internals").glob("*.md")]:
        for name in re.findall(r"`([a-z_]+/[a-z_/]+(?:\.py)?)`", file.read_text()):
            places = [ROOT / name, ROOT / "src" / "whet" / name, ROOT / "tests" / "gateway" / name]
            assert any(place.exists() for place in places), f"{file.name}: {name}"


def test_tests_named_in_decisions_and_internals_exist() -> None:
    files = (ROOT / "tests").rglob("test_*.py")
    known = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    for page in [*(DOCS / "decisions").glob("0*.md"), *(DOCS / "internals").glob("*.md")]:
        text = page.read_text()
        assert set(re.findall(r"`(test_\w+)`", text)) <= known, page.name
        for file in re.findall(r"`(tests/[\w/]+\.py)`", text):
            assert (ROOT / file).is_file(), f"{page.name}: {file}"


def run(folder: Path, *program: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.slow
def test_the_programs_of_the_quickstart_run_as_printed(tmp_path: Path) -> None:
    page = (DOCS / "quickstart.md").read_text()
    programs = dict(PROGRAM.findall(page))
    assert [*programs] == ["agent.py", "tasks.py", "train.py"]
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
    assert run(tmp_path, "tasks.py").returncode == 0
    done = run(tmp_path, "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("last step: ")
    [folder] = (tmp_path / ".whet" / "runs").iterdir()
    assert (folder / "report.json").exists()
    [command] = re.findall(r"^whet (train agent.py:answer .*)$", page, re.MULTILINE)
    trained = run(tmp_path, "-m", "whet", *command.split(), "--debug")
    assert trained.returncode == 0, trained.stderr


@pytest.mark.slow
def test_the_blocks_on_agents_as_code_are_one_program_that_runs(tmp_path: Path) -> None:
    page = (DOCS / "guides" / "agents" / "your-agent.md").read_text()
    agent, hooks, training = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    large = 'model="smollm2", steps=30'
    assert large in training
    # Few answers may all be right: this algorithm learns from them.
    training = training.replace('"grpo"', '"positive"')
    small = "steps=1, tasks_per_step=2, group_size=4, hooks=[Sandboxes()]"
    (tmp_path / "program.py").write_text(agent + hooks + training.replace(large, small))
    done = run(tmp_path, "program.py")
    assert done.returncode == 0, done.stderr
    assert "mean reward of held-out tasks" in done.stdout


def test_the_first_screen_shows_the_first_example_in_twelve_lines() -> None:
    program = (ROOT / "examples" / "quickstart" / "train.py").read_text()
    assert f"```python\n{program}```" in (ROOT / "README.md").read_text()
    assert len([line for line in program.splitlines() if line]) <= 12


@pytest.mark.slow
def test_the_program_of_the_first_screen_runs_as_printed(tmp_path: Path) -> None:
    done = run(tmp_path, ROOT / "examples" / "quickstart" / "train.py")
    assert done.returncode == 0, done.stderr
    base, trained = re.findall(r"greedy +│ +([\d.]+)% │ +([\d.]+)%", done.stdout)[0]
    assert float(trained) - float(base) >= 30


def test_the_page_on_algorithms_shows_the_example_and_names_every_algorithm() -> None:
    page = (DOCS / "guides" / "training" / "algorithms.md").read_text()
    [shown] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert shown in (ROOT / "examples" / "custom_algorithm" / "train.py").read_text()
    assert all(f"| `{name}` |" in page for name in READ_BY)
