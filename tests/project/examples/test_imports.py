"""Examples are what users copy: public names only, one folder each with a README."""

import ast
from pathlib import Path

import pytest

import whet
from support.runs.commands import EXAMPLES

FOLDERS = sorted(path for path in EXAMPLES.iterdir() if path.is_dir() and path.name[0] not in "._")
PROGRAMS = sorted(EXAMPLES.rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(EXAMPLES))


@pytest.mark.parametrize("path", PROGRAMS, ids=relative)
def test_an_example_imports_public_names_only(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "whet":
            names = {alias.name for alias in node.names}
            assert names <= {*whet.__all__, "demos"}
            continue
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "whet":
            assert node.attr in {*whet.__all__, "demos"}
            continue
        else:
            continue
        for module in modules:
            if module.split(".")[0] == "whet":
                assert module == "whet" or module.startswith("whet.demos"), module


@pytest.mark.parametrize("folder", FOLDERS, ids=relative)
def test_an_example_has_a_readme_with_a_command(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    assert text.startswith("# ")
    assert "```sh\n" in text
    assert f"[{folder.name}]({folder.name})" in (EXAMPLES / "README.md").read_text()


def test_every_program_is_in_a_folder() -> None:
    assert not [path for path in PROGRAMS if path.parent == EXAMPLES]
