"""The notebook, run from its first cell to its last by a real Jupyter kernel."""

import ast
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import whet
from support.runs.commands import EXAMPLES

NOTEBOOK = EXAMPLES / "quickstart.ipynb"


@pytest.fixture
def notebook() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_it_is_stored_without_outputs_and_imports_public_names_only(notebook: Any) -> None:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)
    # Cells may await, which a module may not.
    body = "\n".join(f"    {line}" for cell in cells for line in cell.source.splitlines())
    for node in ast.walk(ast.parse(f"async def cells():\n{body}")):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "whet":
            assert node.attr in {*whet.__all__, "demos"}


@pytest.mark.slow
def test_it_trains_draws_the_curve_shows_rollouts_and_serves(notebook: Any, tmp_path: Path) -> None:
    there = {"metadata": {"path": str(tmp_path)}}
    # A cell that raises is an error here.
    NotebookClient(notebook, kernel_name="python3", timeout=900, resources=there).execute()
    cells = {cell.source.split("\n")[0]: cell for cell in notebook.cells}

    trained = read_text(cells["result = whet.train("])
    assert "   6/6 " in trained
    assert "mean reward of held-out tasks" in trained
    [curve] = [html for html in read_html(cells["result = whet.train("]) if "<svg" in html]
    assert "mean reward of steps 1 to 6" in curve, "one picture, drawn anew after each step"
    [result] = cells["result"].outputs
    html = result.data["text/html"]
    assert "<th>greedy</th>" in html
    assert 'src="data:image/png;base64,' in html
    assert "advantage" in read_text(cells["whet.show(result.run)"])
    assert len(cells["whet.show(result.run)"].outputs) <= 3, "the table is one output"
    assert "advantage  " in read_text(cells["whet.show(result.run, step=1, worst=True, limit=1)"])
    served = ast.literal_eval(read_text(cells["with whet.serve(result.run) as llm:"]))
    assert len(served) == 10
    assert set(served) <= {0.0, 1.0}
    [run] = (tmp_path / ".whet" / "runs").iterdir()
    assert (run / "curve.png").is_file()


def read_text(cell: Any) -> str:
    """The outputs of a cell as plain text, without what went to stderr."""
    found = [each.data["text/plain"] for each in cell.outputs if "data" in each]
    return "".join(found)


def read_html(cell: Any) -> list[str]:
    """The outputs of a cell as HTML."""
    return [each.data.get("text/html", "") for each in cell.outputs if "data" in each]
