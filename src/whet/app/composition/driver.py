"""`@whet.algorithm`: drivers, functions of the user that drive a run themselves.

Light to import: a module with a driver is loaded by runners too.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from whet.app.cli.display import open_console, print_note
from whet.app.composition.distributed import (
    STORE_VARIABLE,
    StoreAddress,
    connect_store,
    find_endpoints,
    find_store,
    watch_workers,
)
from whet.app.inputs import Tasks, check_one_policy, load_tasks, publish_resources
from whet.config import resolve
from whet.errors import ConfigError, DriverFailed, WhetError, requires_extra
from whet.io.threads import run_async
from whet.protocols import Store
from whet.runners.agent import Agent, await_result, get_name
from whet.runners.context import describe_raised, format_traceback
from whet.types import Attempt, Endpoint, Outcome

if TYPE_CHECKING:
    from rich.console import Console

    from whet.app.run_folder import RunFolder

KIND = "algorithm"

PARAMETERS = {
    "store": "the run's store: enqueue, wait, trajectories, publish and all else of protocols.py",
    "tasks": "the training tasks, a list",
    "held_out": "the held-out tasks, a list",
    "resources": "the versions of the resources it was started with, by name",
    "gateway": "the endpoint of the policy for calls of its own, which are never recorded",
    "trainer": "the trainer: forward_backward, optim_step, publish, save, restore, export",
    "scorer": "log-probabilities of tokens by the weights being trained, by `logprobs`",
    "config": "the run's config",
    "folder": "the run's folder, for files of its own",
}
"""Parameters that a driver may have."""


class Driver:
    """A function that drives a run; calling it calls the function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises ConfigError if a parameter is unknown."""
        self.function = function
        self.__doc__ = function.__doc__
        self.names = _read_names(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # Any: the function's own signature
        return self.function(*args, **kwargs)

    def run(
        self,
        agent: Agent | None = None,
        tasks: Tasks = (),
        *,
        held_out: Tasks = (),
        resources: Mapping[str, JsonValue] | None = None,
        store: str | None = None,
        quiet: bool = False,
        **settings: JsonValue,
    ) -> Any:  # Any: what the function returns
        """Run the function with everything it names; `settings` are keys of the config.

        The agent is run in this process; with a `store`, or WHET_STORE in the environment,
        `whet serve` and `whet runner` do that at the store. `resources` are published first.

        Raises:
            ConfigError: invalid input; nothing was started.
            DriverFailed: the function raised; its error is the cause.
        """
        with requires_extra("this run", "local"):
            from whet.app.train import prepare_run  # noqa: PLC0415 - imports torch
        _check_driver(self, agent, address := store or os.environ.get(STORE_VARIABLE), settings)
        inputs = {
            "tasks": load_tasks(tasks) if tasks else [],
            "held_out": load_tasks(held_out, "held_out") if held_out else [],
        }
        console = open_console(quiet=quiet)
        agent = agent if address is None else None
        # Parameters are not checked: the function may publish what the agent needs.
        folder = prepare_run(
            agent, settings, KIND, console, agent_inputs=None, store=address, continues=True
        )
        return run_async(_run, self, agent, inputs, dict(resources or {}), folder, console, address)


def algorithm(function: Callable[..., Any]) -> Driver:
    """Mark a function, async or not, as the driver of a run: its parameters say what it needs.

    They are among `store`, `tasks`, `held_out`, `resources`, `gateway`, `trainer`, `scorer`,
    `config`, `folder`.

    Raises:
        ConfigError: a parameter is unknown.
    """
    return Driver(function)


def _read_names(function: Callable[..., Any]) -> frozenset[str]:
    parameters = inspect.signature(function).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty]
    name = get_name(function)
    for parameter in required:
        if parameter not in PARAMETERS:
            raise ConfigError(
                f"the algorithm {name!r} has an unknown parameter {parameter!r}; expected one of "
                f"{', '.join(PARAMETERS)}"
            )
    return frozenset(p.name for p in parameters) & set(PARAMETERS)


def _check_driver(
    driver: Driver, agent: Agent | None, store: str | None, settings: Mapping[str, JsonValue]
) -> None:
    check_one_policy(resolve(settings), "a driver marked with @whet.algorithm")
    if "scorer" in driver.names and resolve(settings).trainer.kind == "tinker":
        raise ConfigError(
            "the parameter 'scorer' needs the weights in this process, found trainer.kind "
            "'tinker': set it to 'local'"
        )
    if store is None and agent is None:
        raise ConfigError("an algorithm needs an agent to run, or a store whose runners run one")


async def _run(
    driver: Driver,
    agent: Agent | None,
    inputs: Mapping[str, Sequence[JsonValue]],
    resources: Mapping[str, JsonValue],
    folder: "RunFolder",
    console: "Console",
    store_url: str | None,
) -> Any:
    from whet.app.composition.run import open_run  # noqa: PLC0415 - imports torch

    progress = partial(print_note, console)

    def on_outcome(attempt: Attempt, outcome: Outcome) -> None:
        if outcome.failure is not None:
            progress(f"{attempt.id} failed: {outcome.failure.message}")

    parts: dict[str, object] = {**inputs, "config": folder.read_config(), "folder": folder.path}
    async with AsyncExitStack() as stack:
        store, address = None, None
        if store_url is not None:
            address = await find_store(store_url, folder.path.name, folder.path.parent.parent)
            store = await stack.enter_async_context(connect_store(address))
        if store is None or driver.names & {"trainer", "scorer"}:
            run = await stack.enter_async_context(
                open_run(folder, agent=agent, store=store, on_outcome=on_outcome, progress=progress)
            )
            store = run.store
            parts |= {
                "trainer": run.trainer,
                "scorer": run.scorer,
                "gateway": run.gateway and run.gateway.own_endpoint,
            }
        else:
            await _announce(store, folder)
        parts |= {"store": store, "resources": await publish_resources(store, resources)}
        if address is not None:
            await stack.enter_async_context(watch_workers(store, progress))
            if "gateway" in driver.names:
                parts["gateway"] = await _find_gateway(store, address)
        return await _call(driver, {name: parts[name] for name in driver.names})


async def _call(driver: Driver, arguments: Mapping[str, object]) -> object:
    try:
        return await await_result(driver(**arguments))
    except WhetError:
        raise
    except Exception as error:
        name = get_name(driver.function)
        failed = DriverFailed(f"the algorithm {name!r} raised: {describe_raised(error)}")
        failed.traceback = format_traceback(error)
        raise failed from error


async def _announce(store: Store, folder: "RunFolder") -> None:
    from whet.app.composition.weight_sync import announce_model  # noqa: PLC0415 - only if needed

    await announce_model(store, folder.read_config())


async def _find_gateway(store: Store, address: StoreAddress) -> Endpoint:
    from whet.app.composition.gateway_server import Gateway  # noqa: PLC0415 - only if needed

    gateways = find_endpoints(store, address.secret)
    await gateways.wait_ready()
    found = gateways.addresses[0]
    return Gateway(found.url, address.secret, found.model).own_endpoint
