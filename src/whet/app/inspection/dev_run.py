"""`whet dev`: run an agent on a few tasks without training, and show everything recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import JsonValue
from rich.console import Console

from whet.app.cli.display import print_note
from whet.app.composition.run import open_run
from whet.app.inputs import NO_INPUTS, AgentInputs, Tasks, load_tasks, plan_rollouts
from whet.app.inspection.attempt_view import AttemptView, draw_attempt, read_attempt
from whet.app.inspection.exactness import ExactnessCounts, count_exactness
from whet.app.inspection.run_list import DEV_KIND
from whet.app.run_folder import RunFolder
from whet.app.train import prepare_run
from whet.config import SelectionConfig
from whet.errors import ConfigError
from whet.io.genai_spans import find_refusals, has_trainable_calls
from whet.io.text import format_count
from whet.io.threads import run_async
from whet.protocols import Store
from whet.runners.agent import Agent
from whet.training.diagnosis import Cause, build_cause_metrics, explain_metrics
from whet.types import Rollout


@dataclass(frozen=True, slots=True)
class DevRun:
    """Result of a dev run."""

    run: Path
    attempts: tuple[AttemptView, ...]
    problem: str | None = None
    """Reason why training would learn nothing from such attempts, whatever their rewards."""

    def as_json(self) -> dict[str, object]:
        """The run folder, every attempt and the problem."""
        attempts = [view.as_json() for view in self.attempts]
        return {"run": str(self.run), "attempts": attempts, "problem": self.problem}


def dev_run(
    agent: Agent,
    tasks: Tasks,
    settings: dict[str, JsonValue],
    console: Console,
    *,
    samples: int,
    agent_inputs: AgentInputs = NO_INPUTS,
) -> DevRun:
    """Run the agent on the first tasks, as training would, and show each attempt.

    Raises:
        ConfigError: invalid arguments; nothing was started.
    """
    if samples < 1:
        raise ConfigError.phrase(
            python=f"invalid samples {samples}: expected at least 1",
            command=f"invalid --samples {samples}: expected at least 1",
        )
    chosen = load_tasks(tasks)[:samples]
    # A dev run takes no name: the run that is named comes after it.
    unnamed = {key: value for key, value in settings.items() if key != "name"}
    folder = prepare_run(agent, unnamed, DEV_KIND, console, agent_inputs=agent_inputs)
    done = run_async(_run, agent, chosen, folder, agent_inputs, console)
    for view in done.attempts:
        console.print(draw_attempt(view))
    console.print(f"nothing was trained; run folder: {folder.path}", highlight=False)
    return done


async def _run(
    agent: Agent,
    tasks: Sequence[JsonValue],
    folder: RunFolder,
    agent_inputs: AgentInputs,
    console: Console,
) -> DevRun:
    progress = partial(print_note, console)
    async with open_run(folder, agent=agent, agent_inputs=agent_inputs, progress=progress) as run:
        rollouts = _plan_rollouts(tasks, folder)
        await run.collector.begin(rollouts)
        await run.collector.wait([rollout.id for rollout in rollouts])
        views = [await read_attempt(run.store, rollout) for rollout in rollouts]
        problem = await _find_problem(views, run.store, run.config.selection)
        return DevRun(folder.path, tuple(views), problem)


async def _find_problem(
    views: Sequence[AttemptView], store: Store, selection: SelectionConfig
) -> str | None:
    """The reason why no attempt has an answer that training could learn from, or None."""
    ended = [view for view in views if view.record.failure is None]
    if not ended:
        return "every attempt failed"
    if any(has_trainable_calls(view.spans) for view in ended):
        return None  # an algorithm of the user's makes calls of these spans
    counts = ExactnessCounts()
    await count_exactness(counts, store, [view.rollout.id for view in ended], selection)
    if counts.rows:
        return None
    silent = sum(not view.calls for view in ended)
    reason = explain_metrics(
        [
            {
                **build_cause_metrics({Cause.NO_CALLS: silent}),
                "constrained_generations": counts.constrained,
                "unselected_generations": counts.unselected.total(),
                "unproven_generations": counts.unproven,
            }
        ]
    )
    refusals = [span for view in ended for span in find_refusals(view.spans)]
    if refusals and not counts.calls:
        reason = f"the gateway refused every model call, such as: {refusals[0].message}"
    return f"training would learn nothing from {format_count(len(ended), 'attempt')}: {reason}"


def _plan_rollouts(tasks: Sequence[JsonValue], folder: RunFolder) -> list[Rollout]:
    """One rollout for each task, in order, without retries: failures are to be seen."""
    config = folder.read_config()
    one = config.model_copy(update={"group_size": 1})
    [example] = plan_rollouts(tasks[:1], one, group_rewards=())(0)
    return [
        example.model_copy(
            update={
                "id": f"dev-{n:03d}",
                "group": f"dev-{n:03d}",
                "task": task,
                "max_attempts": 1,
            }
        )
        for n, task in enumerate(tasks)
    ]
