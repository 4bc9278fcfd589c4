"""A run in the terminal: watched while it works, reported when it is done."""

from collections.abc import Sequence

import anyio
from pydantic import JsonValue
from rich.console import Console

from whet.algorithms import check_algorithm
from whet.app.display import ConsoleDisplay
from whet.app.folder import RunFolder
from whet.app.given import Surroundings
from whet.app.report import draw_picture, print_report
from whet.app.training import Result, run_training
from whet.app.wire import NOTHING
from whet.config import RunConfig
from whet.policies.catalogue import resolve_model
from whet.protocols import Algorithm
from whet.runners.agent import Agent
from whet.tracking import check_installed


def new_run(config: RunConfig, kind: str, console: Console) -> RunFolder:
    """A folder for a new run, once its model is there: a run that cannot start leaves nothing."""
    check_installed(config.tracking)
    check_algorithm(config)
    resolve_model(config.model, progress=lambda text: console.print(text, highlight=False))
    return RunFolder.create(config, kind)


def work(
    agent: Agent,
    tasks: Sequence[JsonValue],
    held_out: Sequence[JsonValue],
    folder: RunFolder,
    console: Console,
    algorithm: Algorithm | None = None,
    surroundings: Surroundings = NOTHING,
) -> Result:
    """Do what is left of a run, and say what it came to."""
    with ConsoleDisplay(console) as display:
        result = anyio.run(
            run_training, agent, tasks, held_out, folder, display, algorithm, surroundings
        )
    draw_picture(result, folder.picture)
    print_report(console, result)
    return result
