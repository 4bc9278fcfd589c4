"""What the suite shows of each SDK, as the table of `docs/guides/sdks.md`."""

import json
from collections.abc import Mapping
from pathlib import Path

from sdks.recipes import Recipe
from sdks.trial import GROUP, TASKS, Trial
from whet.app.inspection.span_links import link_spans
from whet.demos.problems import calculate
from whet.types import Call, Trajectory

COLUMNS = ("attributed", "merged", "streamed", "tools", "trained")
FILE = Path(__file__).parent / "matrix.json"
"""What `docs/guides/sdks.md` says; `python scripts/document_sdks.py` writes the page from it."""

Cells = Mapping[str, str]


def examine(trial: Trial, recipe: Recipe) -> Cells:
    """The cells of an SDK's row, each proven by what its trial left in the store."""
    return {
        "attributed": _attributed(trial, recipe),
        "merged": _merged(trial, recipe),
        "streamed": _streamed(trial, recipe),
        "tools": _tools(trial),
        "trained": _trained(trial, recipe),
    }


def check_spans(trial: Trial) -> None:
    """Every rollout has the spans of its SDK, and one of them is about each of its calls."""
    for trajectory in trial.trajectories:
        spans = trial.spans[trajectory.attempt.id]
        asked = [span for span in spans if span.attributes.get("gen_ai.operation.name") == "chat"]
        joints = link_spans(spans, trajectory.calls)
        about = sorted(joint.call for joint in joints.values())
        assert about == sorted(call.id for call in trajectory.calls), (asked, joints)
        assert len(asked) == len(trajectory.calls)
        assert any(span.name.startswith("invoke_agent") for span in spans)
    assert not [said for said in trial.warnings if "uploads traces" in said]


def as_text(rows: Mapping[str, Cells]) -> str:
    """The rows as a table for a terminal."""
    lines = [("SDK", *COLUMNS), *((name, *cells.values()) for name, cells in rows.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def _attributed(trial: Trial, recipe: Recipe) -> str:
    """Every rollout succeeded, and its calls are about its own question."""
    assert len(trial.trajectories) == TASKS * GROUP, trial.said
    for trajectory in trial.trajectories:
        assert trajectory.calls, trial.said
        for call in trajectory.calls:
            assert call.attempt == trajectory.attempt.id
            assert call.origin.dialect == recipe.dialect
            if call.parent is None:
                assert _question(trajectory) in json.dumps(call.messages)
    return "yes"


def _merged(trial: Trial, recipe: Recipe) -> str:
    """A turn after the first begins with the tokens that were sampled before it."""
    later = [call for trajectory in trial.trajectories for call in trajectory.calls[1:]]
    assert later, "no rollout came to a second turn"
    forks = {call.origin.fork for call in later}
    if not recipe.forks:
        assert forks == {None}, [call.model_dump_json() for call in later if call.origin.fork]
        for trajectory in trial.trajectories:
            for before, call in zip(trajectory.calls, trajectory.calls[1:], strict=False):
                assert call.parent == before.generation_id(0)
        return "yes"
    assert recipe.forks[0] in forks
    assert forks <= {None, *recipe.forks}
    return f"no: `{recipe.forks[0]}`"


def _streamed(trial: Trial, recipe: Recipe) -> str:
    """Exactly the rollouts that asked for it were streamed, if they may choose."""
    asked = {
        trajectory.attempt.id
        for trajectory in trial.trajectories
        if recipe.streams == "always" or (recipe.streams == "both" and _task(trajectory)["stream"])
    }
    assert trial.streamed == asked
    return {"always": "always", "both": "yes", "never": "no"}[recipe.streams]


def _tools(trial: Trial) -> str:
    """The calculator was called, and what it gave came back in the next turn."""
    came_back = [
        result in json.dumps(second.messages)
        for first, second, *_ in (t.calls for t in trial.trajectories if len(t.calls) > 1)
        for result in _calculated(first)
    ]
    assert came_back
    assert all(came_back)
    return "yes"


def _trained(trial: Trial, recipe: Recipe) -> str:
    """One step learned from exactly what was sampled."""
    metrics = trial.step.metrics
    assert 0 < metrics["reward"] < 1
    assert metrics["rows"] > 0
    assert metrics["failed_rollouts"] == metrics["unproven_generations"] == 0
    assert metrics["constrained_generations"] == 0
    assert metrics["logprob_gap"] < 1e-4
    assert metrics["calls_per_row"] > 1 or recipe.forks
    assert trial.step.version == 1
    return "yes"


def _calculated(call: Call) -> list[str]:
    """What the calculator gives for the tool calls of an answer, where it can."""
    found: list[str] = []
    for called in call.generations[0].message.get("tool_calls") or []:  # pyright: ignore
        if called["name"] == "calculator":
            asked = json.loads(called["arguments"])
            found.append(calculate(str(asked.get("expression", ""))))
    return [result for result in found if not result.startswith("error")]


def _task(trajectory: Trajectory) -> dict[str, object]:
    task = trajectory.attempt.rollout.task
    assert isinstance(task, dict)
    return {**task}


def _question(trajectory: Trajectory) -> str:
    return str(_task(trajectory)["question"])
