"""The results of the suite for each SDK: the table of `docs/guides/agents/sdks.md`."""

import json
from collections.abc import Mapping
from pathlib import Path

from integrations.sdks.agent_run import GROUP, TASKS, AgentRun
from integrations.sdks.recipes import Recipe
from whet.app.inspection.span_links import link_spans
from whet.demos.problems import calculate
from whet.types import Call, Trajectory

COLUMNS = ("attributed", "merged", "streamed", "tools", "trained")
FILE = Path(__file__).parent / "matrix.json"
"""The table of `docs/guides/agents/sdks.md`; `scripts/document_sdks.py` writes the page from it."""

Cells = Mapping[str, str]


def examine(run: AgentRun, recipe: Recipe) -> Cells:
    """The cells of an SDK's row, each proven by what its run left in the store."""
    return {
        "attributed": _attributed(run, recipe),
        "merged": _merged(run, recipe),
        "streamed": _streamed(run, recipe),
        "tools": _tools(run),
        "trained": _trained(run, recipe),
    }


def check_spans(run: AgentRun) -> None:
    """Every rollout has the spans of its SDK, and one of them is about each of its calls."""
    for trajectory in run.trajectories:
        spans = run.spans[trajectory.attempt.id]
        chats = [span for span in spans if span.attributes.get("gen_ai.operation.name") == "chat"]
        joints = link_spans(spans, trajectory.calls)
        about = sorted(joint.call for joint in joints.values())
        assert about == sorted(call.id for call in trajectory.calls), (chats, joints)
        assert len(chats) == len(trajectory.calls)
        assert any(span.name.startswith("invoke_agent") for span in spans)
    assert not [text for text in run.warnings if "uploads traces" in text]


def as_text(rows: Mapping[str, Cells]) -> str:
    """The rows as a table for a terminal."""
    lines = [("SDK", *COLUMNS), *((name, *cells.values()) for name, cells in rows.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def _attributed(run: AgentRun, recipe: Recipe) -> str:
    """Every rollout succeeded, and its calls are about its own question."""
    assert len(run.trajectories) == TASKS * GROUP, run.log
    for trajectory in run.trajectories:
        assert trajectory.calls, run.log
        for call in trajectory.calls:
            assert call.attempt == trajectory.attempt.id
            assert call.origin.dialect == recipe.dialect
            if call.parent is None:
                assert _question(trajectory) in json.dumps(call.messages)
    return "yes"


def _merged(run: AgentRun, recipe: Recipe) -> str:
    """A turn after the first begins with the tokens that were sampled before it."""
    later = [call for trajectory in run.trajectories for call in trajectory.calls[1:]]
    assert later, "no rollout came to a second turn"
    forks = {call.origin.fork for call in later}
    if not recipe.forks:
        assert forks == {None}, [call.model_dump_json() for call in later if call.origin.fork]
        for trajectory in run.trajectories:
            for before, call in zip(trajectory.calls, trajectory.calls[1:], strict=False):
                assert call.parent == before.generation_id(0)
        return "yes"
    assert recipe.forks[0] in forks
    assert forks <= {None, *recipe.forks}
    return f"no: `{recipe.forks[0]}`"


def _streamed(run: AgentRun, recipe: Recipe) -> str:
    """Exactly the rollouts that asked for it were streamed, if they may choose."""
    expected = {
        trajectory.attempt.id
        for trajectory in run.trajectories
        if recipe.streams == "always" or (recipe.streams == "both" and _task(trajectory)["stream"])
    }
    assert run.streamed == expected
    return {"always": "always", "both": "yes", "never": "no"}[recipe.streams]


def _tools(run: AgentRun) -> str:
    """The calculator was called, and what it gave came back in the next turn."""
    came_back = [
        result in json.dumps(second.messages)
        for first, second, *_ in (t.calls for t in run.trajectories if len(t.calls) > 1)
        for result in _calculated(first)
    ]
    assert came_back
    assert all(came_back)
    return "yes"


def _trained(run: AgentRun, recipe: Recipe) -> str:
    """One step learned from exactly what was sampled."""
    metrics = run.step.metrics
    assert 0 < metrics["reward"] < 1
    assert metrics["rows"] > 0
    assert metrics["failed_rollouts"] == metrics["unproven_generations"] == 0
    assert metrics["constrained_generations"] == 0
    assert metrics["logprob_gap"] < 1e-4
    assert metrics["calls_per_row"] > 1 or recipe.forks
    assert run.step.version == 1
    return "yes"


def _calculated(call: Call) -> list[str]:
    """The calculator's results for the tool calls of an answer, without its errors."""
    found: list[str] = []
    for called in call.generations[0].message.get("tool_calls") or []:  # pyright: ignore
        if called["name"] == "calculator":
            arguments = json.loads(called["arguments"])
            found.append(calculate(str(arguments.get("expression", ""))))
    return [result for result in found if not result.startswith("error")]


def _task(trajectory: Trajectory) -> dict[str, object]:
    task = trajectory.attempt.rollout.task
    assert isinstance(task, dict)
    return {**task}


def _question(trajectory: Trajectory) -> str:
    return str(_task(trajectory)["question"])
