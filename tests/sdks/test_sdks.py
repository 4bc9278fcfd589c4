"""The real SDK of every recipe, in its own environment, through a training step."""

import json
from pathlib import Path

import pytest
from environments import python_of
from matrix import FILE, Cells, examine
from recipes import EXAMPLES, RECIPES, Recipe
from trial import Runner, try_out

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_an_unmodified_agent_is_recorded_and_trained(
    recipe: Recipe, found: dict[str, Cells], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = f"{EXAMPLES / recipe.example}.py:{recipe.function}"
    runner = Runner(python_of(recipe.pins), agent, dict(recipe.environment))
    trial = try_out("sdk", runner, tmp_path, monkeypatch)
    found[recipe.name] = examine(trial, recipe)
    assert found[recipe.name] == json.loads(FILE.read_text())[recipe.name]
