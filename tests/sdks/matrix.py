"""What the suite shows of each SDK, as the table of `docs/agents.md`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from recipes import Recipe
from trial import GROUP, TASKS, Trial

from whet.types import Call, Trajectory

COLUMNS = ("attributed", "merged", "streamed", "tools", "trained")
FILE = Path(__file__).parent / "matrix.json"
"""What `docs/agents.md` says; `python scripts/document_sdks.py` writes the page from it."""

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
    if recipe.fork is None:
        assert forks == {None}
        for trajectory in trial.trajectories:
            for before, call in zip(trajectory.calls, trajectory.calls[1:], strict=False):
                assert call.parent == before.generation_id(0)
        return "yes"
    assert forks == {recipe.fork}
    return f"no: `{recipe.fork}`"


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
    """Calls were made, and what the tool gave came back in the next turn."""
    used = [t for t in trial.trajectories if _called(t.calls[0]) and len(t.calls) > 1]
    assert used
    for trajectory in used:
        [called, *_] = _called(trajectory.calls[0])
        assert called in json.dumps(trajectory.calls[1].messages)
    return "yes"


def _trained(trial: Trial, recipe: Recipe) -> str:
    """One step learned from exactly what was sampled."""
    metrics = trial.step.metrics
    assert 0 < metrics["reward"] < 1
    assert metrics["rows"] > 0
    assert metrics["failed_rollouts"] == metrics["unproven_rows"] == 0
    assert metrics["constrained_generations"] == 0
    assert metrics["logprob_gap"] < 1e-4
    assert (metrics["merge_ratio"] > 1) == (recipe.fork is None)
    assert trial.step.version == 1
    return "yes"


def _called(call: Call) -> Sequence[str]:
    """The ids of the tool calls of an answer."""
    calls = call.generations[0].message.get("tool_calls") or []
    assert isinstance(calls, list)
    return [str(each["id"]) for each in calls if isinstance(each, dict)]


def _task(trajectory: Trajectory) -> dict[str, object]:
    task = trajectory.attempt.rollout.task
    assert isinstance(task, dict)
    return {**task}


def _question(trajectory: Trajectory) -> str:
    return str(_task(trajectory)["question"])
