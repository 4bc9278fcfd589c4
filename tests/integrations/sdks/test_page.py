"""`docs/guides/agents/sdks.md` shows the lines that the suite runs, and what the suite found."""

import json

from integrations.sdks.matrix import COLUMNS, FILE
from integrations.sdks.recipes import EXAMPLES, RECIPES, ROOT
from support.scripts import load_script


def test_the_page_is_as_the_script_writes_it() -> None:
    # `python scripts/document_sdks.py` writes it anew.
    written = (ROOT / "docs" / "guides" / "agents" / "sdks.md").read_text()
    assert written == load_script("document_sdks").build_page()


def test_every_recipe_has_its_cells_and_every_example_a_recipe() -> None:
    found = json.loads(FILE.read_text())
    assert list(found) == [recipe.name for recipe in RECIPES]
    assert all(tuple(cells) == COLUMNS for cells in found.values())
    examples = {file.stem for file in EXAMPLES.glob("*.py")} - {"sums"}
    assert examples == {recipe.example for recipe in RECIPES}


def test_a_user_changes_a_few_lines_only() -> None:
    for recipe in RECIPES:
        assert len(recipe.changed.splitlines()) <= 8, recipe.name
