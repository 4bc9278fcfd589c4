"""Write the table and recipes of `docs/guides/agents/sdks.md` from `tests/integrations/sdks`."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "guides" / "agents" / "sdks.md"
GENERATED = re.compile(r"(<!-- sdks: begin -->\n).*(<!-- sdks: end -->\n)", re.DOTALL)

sys.path.insert(0, str(ROOT / "tests"))

from integrations.sdks.recipes import RECIPES, Recipe  # noqa: E402 - found by the line above


def build_page() -> str:
    """Return the page with its generated part up to date."""
    found = json.loads((ROOT / "tests" / "integrations" / "sdks" / "matrix.json").read_text())
    columns = list(next(iter(found.values())))
    table = [
        f"| SDK | tested with | {' | '.join(columns)} |",
        "|---" * (len(columns) + 2) + "|",
        *(_row(recipe, found[recipe.name]) for recipe in RECIPES),
    ]
    sections = "\n".join(_section(recipe) for recipe in RECIPES)
    body = "\n".join(table) + "\n\n" + sections
    return GENERATED.sub(lambda marks: f"{marks[1]}{body}{marks[2]}", PAGE.read_text())


def _row(recipe: Recipe, cells: dict[str, str]) -> str:
    anchor = re.sub(r"[^a-z0-9 -]", "", recipe.name.lower()).replace(" ", "-")
    cited = f"[{recipe.name}](#{anchor})", f"{recipe.package} {recipe.version}"
    return f"| {' | '.join((*cited, *cells.values()))} |"


def _section(recipe: Recipe) -> str:
    note = f"\n{recipe.note}\n" if recipe.note else ""
    return (
        f"### {recipe.name}\n\n```python\n{recipe.changed}```\n{note}\n"
        f"Complete agent: [examples/sdks/{recipe.example}.py]"
        f"(../../../examples/sdks/{recipe.example}.py)\n"
    )


if __name__ == "__main__":
    PAGE.write_text(build_page())
