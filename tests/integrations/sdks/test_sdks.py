"""The real SDK of every recipe, in its own environment, through a training step."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from integrations.sdks.agent_run import GROUP, TASKS, Runner, run_agent
from integrations.sdks.environments import python_of
from integrations.sdks.matrix import FILE, Cells, check_spans, examine
from integrations.sdks.recipes import EXAMPLES, RECIPES, ROOT, SUITE, Recipe
from whet.types import Call, digest_tokens

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_an_unmodified_agent_is_recorded_and_trained(
    recipe: Recipe, found: dict[str, Cells], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_agent(_runner(recipe), tmp_path, monkeypatch)
    found[recipe.name] = examine(run, recipe)
    assert found[recipe.name] == json.loads(FILE.read_text())[recipe.name]
    if recipe.tracer:
        check_spans(run)


def _runner(recipe: Recipe) -> Runner:
    environment = dict(recipe.environment)
    if recipe.beside:
        beside = python_of(recipe.beside).parent
        environment["PATH"] = f"{beside}{os.pathsep}{os.environ['PATH']}"
    agent = f"{EXAMPLES / recipe.example}.py:{recipe.function}"
    return Runner(python_of(recipe.pins), agent, environment, tracer=recipe.tracer)


def run_example(pins: str, script: str, *arguments: str, path: str = "") -> str:
    """Run a script of the examples with whet here, beside the packages of an SDK."""
    [packages] = python_of(pins).parents[1].glob("lib/python3*/site-packages")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(packages)]),
        "PATH": os.pathsep.join([*([path] if path else []), os.environ["PATH"]]),
    }
    done = subprocess.run(
        [sys.executable, EXAMPLES.parent / script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    # It ends with 1 if all attempts of a group succeed or fail alike.
    assert done.returncode == 0 or "nothing was trained" in done.stderr, done.stderr
    return done.stdout + done.stderr


def test_the_strands_example_collects_trains_and_evaluates(tmp_path: Path) -> None:
    small = ("--steps", "1", "--held-out", "2", "--dir", str(tmp_path))
    output = run_example("strands", "strands_math/pipeline.py", "all", *small)
    assert "of 2 rollouts" in output
    assert "TITO rate 100%" in output
    report = json.loads((tmp_path / "runs" / "strands-math" / "report.json").read_text())
    assert (report["steps"], report["rollouts"], report["unproven_generations"]) == (1, 64, 0)
    [compared] = tmp_path.glob("runs/eval-*/report.json")
    assert [*json.loads(compared.read_text())["models"]] == ["base", "trained"]


def test_the_agent_framework_example_trains(tmp_path: Path) -> None:
    small = ("--steps", "1", "--tasks-per-step", "1", "--held-out", "1", "--name", "run")
    run_example(
        "agent-framework",
        "agent_framework_math/train.py",
        *(*small, "--dir", str(tmp_path)),
        path=str(python_of("mcp-server-calculator").parent),
    )
    report = json.loads((tmp_path / "runs" / "run" / "report.json").read_text())
    assert (report["steps"], report["rollouts"], report["unproven_generations"]) == (1, 8, 0)


def test_a_recorder_has_the_tokens_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [recipe] = [recipe for recipe in RECIPES if recipe.name == "strands-vllm"]
    agent = f"{SUITE / 'recorded.py'}:solve"
    run = run_agent(_runner(recipe)._replace(agent=agent), tmp_path, monkeypatch)
    assert len(run.trajectories) == TASKS * GROUP
    for trajectory in run.trajectories:
        recorded = json.loads((tmp_path / f"{trajectory.attempt.id}.json").read_text())
        assert recorded["history"] == [
            {"prompt_token_ids": list(prompt), "token_ids": list(call.generations[0].tokens)}
            for call, prompt in zip(trajectory.calls, _prompts(trajectory.calls), strict=True)
        ]
        assert recorded["last"] == recorded["history"][-1]


def _prompts(calls: Sequence[Call]) -> Iterator[tuple[int, ...]]:
    """The prompts that the engine got for the calls of a conversation without branches."""
    before: tuple[int, ...] = ()
    for call in calls:
        prompt = before + call.prompt_suffix
        assert digest_tokens(prompt).hexdigest() == call.prompt_digest
        yield prompt
        before = prompt + call.generations[0].tokens
