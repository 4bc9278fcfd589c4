"""Runs a user's algorithm: in one process with its agent, or beside the others of its run."""

import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from pydantic import JsonValue
from rich.console import Console

from whet.app.addresses import STORE_VARIABLE
from whet.app.algorithm import OwnAlgorithm
from whet.app.console import new_run
from whet.app.folder import RunFolder
from whet.app.given import published
from whet.app.places import Place, find_place, joined
from whet.app.published import announce_model
from whet.app.signals import run_async
from whet.app.tasks import Tasks, load_tasks
from whet.app.training_process import attended, joint_folder
from whet.app.wire import open_run, open_training
from whet.app.working import Gateway
from whet.config import resolve
from whet.errors import ConfigError
from whet.gateway import keys
from whet.protocols import Store
from whet.runners.agent import Agent, awaited, check_agent
from whet.runners.gateways import RemoteGateways
from whet.types import Attempt, Endpoint, Outcome


def run_algorithm(
    algorithm: OwnAlgorithm,
    agent: Agent | None,
    tasks: Tasks,
    *,
    held_out: Tasks,
    resources: Mapping[str, JsonValue],
    store: str | None,
    quiet: bool,
    settings: dict[str, JsonValue],
) -> Any:  # Any: what the function returns
    """Run it, and give what it returns."""
    console = Console(quiet=quiet)
    data = {
        "tasks": load_tasks(tasks) if tasks else [],
        "held_out": load_tasks(held_out) if held_out else [],
    }
    if "scorer" in algorithm.names and resolve(settings).trainer.kind == "tinker":
        raise ConfigError(
            "the algorithm asks for 'scorer', which needs the weights here, and trainer.kind is "
            "'tinker': set it to 'local'"
        )
    address = store or os.environ.get(STORE_VARIABLE)
    if address is not None:
        folder = joint_folder(settings, console)
        return run_async(_run_joint, algorithm, data, resources, folder, console, address)
    if agent is None:
        raise ConfigError(
            "an algorithm needs an agent to run, or a store where `whet runner` runs one"
        )
    check_agent(agent)
    folder = _own_folder(settings, console)
    return run_async(_run_alone, algorithm, agent, data, resources, folder, console)


def _own_folder(settings: dict[str, JsonValue], console: Console) -> RunFolder:
    config = resolve(settings)
    if config.name is not None:
        folder = RunFolder(config.dir / "runs" / config.name)
        if folder.config_file.exists():
            folder.resume(settings)
            return folder
    return new_run(config, "algorithm", console)


async def _run_alone(
    algorithm: OwnAlgorithm,
    agent: Agent,
    data: Mapping[str, Sequence[JsonValue]],
    resources: Mapping[str, JsonValue],
    folder: RunFolder,
    console: Console,
) -> Any:
    def on_outcome(attempt: Attempt, outcome: Outcome) -> None:
        if outcome.failure is not None:
            console.print(f"{attempt.id} failed: {outcome.failure.message}", highlight=False)

    async with open_run(agent, folder, on_outcome=on_outcome, progress=console.print) as run:
        parts = {
            **data,
            "store": run.store,
            "resources": await published(run.store, resources),
            "gateway": run.gateway,
            "trainer": run.trainer,
            "scorer": run.scorer,
            "config": run.config,
        }
        return await _call(algorithm, parts)


async def _run_joint(
    algorithm: OwnAlgorithm,
    data: Mapping[str, Sequence[JsonValue]],
    resources: Mapping[str, JsonValue],
    folder: RunFolder,
    console: Console,
    address: str,
) -> Any:
    say = partial(console.print, highlight=False)
    place = await find_place(address, folder.path.name, folder.path.parent.parent)
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(joined(place))
        parts: dict[str, object] = {**data, "store": store, "config": folder.config()}
        if algorithm.names & {"trainer", "scorer"}:
            training = open_training(folder, store, on_ended=lambda _: None, progress=say)
            run = await stack.enter_async_context(training)
            parts |= {"trainer": run.trainer, "scorer": run.scorer}
        else:
            await announce_model(store, folder.config())
        parts["resources"] = await published(store, resources)
        await stack.enter_async_context(attended(store, say))
        if "gateway" in algorithm.names:
            parts["gateway"] = await _gateway(store, place)
        return await _call(algorithm, parts)


async def _call(algorithm: OwnAlgorithm, parts: Mapping[str, object]) -> Any:
    return await awaited(algorithm(**{name: parts[name] for name in algorithm.names}))


async def _gateway(store: Store, place: Place) -> Endpoint:
    gateways = RemoteGateways(store, partial(keys.mint, secret=place.secret))
    await gateways.ready()
    address = gateways.addresses[0]
    return Gateway(address.url, place.secret, address.model).own_endpoint
