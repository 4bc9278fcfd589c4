"""`whet dev`: run an agent on a few tasks without training, and show everything recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import JsonValue
from rich.console import Console

from whet.app.composition.run import open_run
from whet.app.inputs import NO_INPUTS, AgentInputs, Tasks, load_tasks, plan_rollouts
from whet.app.inspection.attempt_view import AttemptView, draw_attempt, read_attempt
from whet.app.inspection.run_list import DEV_KIND
from whet.app.run_folder import RunFolder
from whet.app.train import prepare_run
from whet.errors import ConfigError
from whet.io.threads import run_async
from whet.runners.agent import Agent
from whet.types import Rollout


@dataclass(frozen=True, slots=True)
class DevRun:
    """Result of a dev run."""

    run: Path
    attempts: tuple[AttemptView, ...]

    def as_json(self) -> dict[str, object]:
        """The run folder and every attempt."""
        return {"run": str(self.run), "attempts": [view.as_json() for view in self.attempts]}


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
    attempts = run_async(_run, agent, chosen, folder, agent_inputs, console)
    for view in attempts:
        console.print(draw_attempt(view))
    console.print(f"nothing was trained; run folder: {folder.path}", highlight=False)
    return DevRun(folder.path, tuple(attempts))


async def _run(
    agent: Agent,
    tasks: Sequence[JsonValue],
    folder: RunFolder,
    agent_inputs: AgentInputs,
    console: Console,
) -> list[AttemptView]:
    progress = partial(console.print, highlight=False)
    async with open_run(folder, agent=agent, agent_inputs=agent_inputs, progress=progress) as run:
        rollouts = _plan_rollouts(tasks, folder)
        await run.collector.begin(rollouts)
        await run.collector.wait([rollout.id for rollout in rollouts])
        return [await read_attempt(run.store, rollout) for rollout in rollouts]


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
