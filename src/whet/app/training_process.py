"""`whet train --store`: the process that trains, while others serve and run."""

import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
from anyio import create_task_group
from pydantic import JsonValue
from rich.console import Console

from whet.app.console import new_run
from whet.app.display import ConsoleDisplay, Display
from whet.app.folder import RunFolder
from whet.app.given import Surroundings
from whet.app.places import find_place, joined
from whet.app.report import draw_picture, print_report
from whet.app.signals import run_async
from whet.app.training import Result, train_and_compare
from whet.app.wire import NOTHING, open_training
from whet.config import resolve
from whet.protocols import Algorithm, Store
from whet.runners.preflight import warnings_in
from whet.store.sql import DEFAULT_RUN

LOOK_S = 2.0
"""How often it is looked who is there."""
LONELY_S = 15.0
"""After so long without a runner it is said how to start one."""


def joint_folder(values: dict[str, JsonValue], console: Console) -> RunFolder:
    """The folder of a run in a store: the same command begins the run and goes on with it."""
    values = {"name": DEFAULT_RUN} | values
    config = resolve(values)
    folder = RunFolder(config.dir / "runs" / str(config.name))
    if folder.config_file.exists():
        folder.resume(values)
        return folder
    return new_run(config, "train", console)


def train_joint(
    tasks: Sequence[JsonValue],
    held_out: Sequence[JsonValue],
    folder: RunFolder,
    console: Console,
    *,
    address: str,
    algorithm: Algorithm | None = None,
    surroundings: Surroundings = NOTHING,
) -> Result:
    """Do what is left of a run whose rollouts other processes run, and say what it came to."""
    with ConsoleDisplay(console) as display:
        result = run_async(
            _train, tasks, held_out, folder, display, address, algorithm, surroundings
        )
    draw_picture(result, folder.picture)
    print_report(console, result)
    return result


async def _train(
    tasks: Sequence[JsonValue],
    held_out: Sequence[JsonValue],
    folder: RunFolder,
    display: Display,
    address: str,
    algorithm: Algorithm | None,
    surroundings: Surroundings,
) -> Result:
    directory = folder.path.parent.parent
    place = await find_place(address, folder.path.name, directory)
    folder.keep_tasks(tasks, held_out)
    async with (
        joined(place) as store,
        open_training(
            folder,
            store,
            algorithm=algorithm,
            surroundings=surroundings,
            on_ended=display.ended,
            progress=display.note,
        ) as parts,
        attended(store, display.note),
    ):
        return await train_and_compare(parts, tasks, held_out, display)


@asynccontextmanager
async def attended(store: Store, note: Callable[[str], None]) -> AsyncGenerator[None]:
    """Say who joins, who is gone, and what runners warn of while the block works."""
    here = set[str]()
    warned = set[str]()

    async def look() -> None:
        nonlocal here
        seen = anyio.current_time()
        while True:
            now = {worker.name for worker in await store.workers() if worker.due > time.time()}
            for name in sorted(now - here):
                note(f"runner {name} is here")
            for name in sorted(here - now):
                note(f"runner {name} is gone")
            here = now
            for name, text in (await warnings_in(store)).items():
                if name not in warned:
                    warned.add(name)
                    note(text)
            if here:
                seen = anyio.current_time()
            elif anyio.current_time() > seen + LONELY_S:
                seen = math.inf
                note("no runner is here: start one with `whet runner module:agent`")
            await anyio.sleep(LOOK_S)

    async with create_task_group() as tasks:
        tasks.start_soon(look)
        yield
        tasks.cancel_scope.cancel()
