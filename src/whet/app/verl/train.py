"""A run that verl trains: the store and the runners here, verl in a process of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
from pydantic import JsonValue
from rich.console import Console

from whet.app.cli.display import open_console
from whet.app.composition.distributed import (
    STORE_VARIABLE,
    StoreAddress,
    connect_store,
    find_endpoints,
    find_store,
    watch_workers,
)
from whet.app.composition.gateway_server import run_agents
from whet.app.composition.ray_runners import run_agents_on_ray
from whet.app.inputs import Tasks, load_tasks
from whet.app.run_folder import RunFolder
from whet.app.train import KIND, prepare_run
from whet.config import RunConfig, VerlConfig
from whet.errors import ConfigError, RunFailed
from whet.io.process import SUPERVISED
from whet.io.threads import run_async
from whet.models.catalog import resolve_model
from whet.protocols import Store
from whet.runners.agent import Agent
from whet.store import DEFAULT_RUN
from whet.store.http import token
from whet.store.http.server import StoreServer
from whet.store.sql_store import SQLStore
from whet.trainers.verl.settings import SECTION, Overrides, build_overrides
from whet.types import Reward

EXIT_CONFIG_ERROR = 2
STOP_TIMEOUT_S = 60.0
BRIDGE_CPUS = 1.0


def train_verl(
    agent: Agent,
    tasks: Tasks,
    *,
    held_out: Tasks | None = None,
    resume: bool = False,
    store: str | None = None,
    quiet: bool = False,
    settings: dict[str, JsonValue],
) -> dict[str, JsonValue]:
    """Train an agent with verl; `settings` are keys of the config, `trainer.kind` among them.

    Raises:
        ConfigError: invalid input; nothing was started.
        RunFailed: verl ended with an error.
    """
    console = open_console(quiet=quiet)
    address = store or os.environ.get(STORE_VARIABLE)
    train_on, evaluate_on = (
        load_tasks(tasks),
        load_tasks(held_out, "held_out") if held_out is not None else [],
    )
    folder = prepare_run(agent, settings, KIND, console, store=address, resume=resume)
    return train_with_verl(agent, train_on, evaluate_on, folder, console, store=address)


def train_with_verl(
    agent: Agent | None,
    tasks: Sequence[JsonValue],
    held_out: Sequence[JsonValue],
    folder: RunFolder,
    console: Console,
    *,
    store: str | None,
) -> dict[str, JsonValue]:
    """Train a run with verl to its end, and return where its checkpoints are.

    With a `store` it has the rollouts, and runners elsewhere run them unless `runner.ray` is set.

    Raises:
        ConfigError: a setting of verl is wrong; nothing was started.
        RunFailed: verl ended with an error, whose lines are above.
    """
    folder.keep_tasks(tasks, held_out)
    return run_async(partial(_run, agent, tasks, held_out, folder, console, store))


async def _run(
    agent: Agent | None,
    tasks: Sequence[JsonValue],
    held_out: Sequence[JsonValue],
    folder: RunFolder,
    console: Console,
    store_url: str | None,
) -> dict[str, JsonValue]:
    config = folder.read_config()
    progress = partial(console.print, highlight=False)
    store: Store
    async with AsyncExitStack() as stack:
        stack.enter_context(folder.lock())  # first: the folder of another process is not deleted
        stack.callback(folder.discard_if_new)
        settings = write_settings(config, folder, tasks, held_out)
        await _check_settings(config, settings)
        if store_url is None:
            own = await stack.enter_async_context(folder.open_store())
            address = await stack.enter_async_context(_serve_store(own, folder))
            store = own
        else:
            address = await find_store(store_url, folder.path.name, folder.path.parent.parent)
            store = await stack.enter_async_context(connect_store(address))
        _write_address(settings, address, folder, store_url)
        folder.keep()
        if config.runner.ray is not None and agent is not None:
            running = run_agents_on_ray(agent, config.runner, store, address, progress=progress)
        elif agent is not None and store_url is None:
            endpoints = find_endpoints(store, address.secret)
            running = run_agents(
                agent,
                config.runner,
                store,
                endpoints,
                explain_unread=explain_unread,
                on_warning=progress,
            )
        else:
            running = watch_workers(store, progress)
        await stack.enter_async_context(running)
        await _run_verl(config, settings, folder.path.name, is_alone=store_url is None)
        counts = await store.counts()
    return {
        "run": str(folder.path),
        "checkpoints": str(folder.checkpoints),
        "rollouts": counts["rollouts"],
        "sampled_tokens": counts["sampled_tokens"],
    }


# ------------------------------------------------------------------- settings of verl


async def explain_unread(reward: Reward) -> str:
    """Return why verl does not read a reward; empty if it does."""
    if reward.is_of_judge or reward.is_own:
        return ""
    return "verl reads only the reward of the attempt: add it to what the agent returns"


def write_settings(
    config: RunConfig,
    folder: RunFolder,
    tasks: Sequence[JsonValue],
    held_out: Sequence[JsonValue],
) -> Path:
    """Write tasks and verl's settings into the run's folder; returns the file of the settings.

    Raises:
        ConfigError: the user's keys contradict whet's.
    """
    path = folder.path.absolute()
    model = resolve_model(config.model).absolute()
    files = {"tasks": path / "verl-tasks.jsonl", "held_out": path / "verl-held-out.jsonl"}
    for name, values in (("tasks", tasks), ("held_out", held_out)):
        files[name].write_text("".join(json.dumps(value) + "\n" for value in values))
    overrides = build_overrides(
        config,
        model=model,
        folder=path,
        tasks=files["tasks"],
        held_out=files["held_out"] if held_out else None,
    )
    overrides |= _build_own_section({"model": str(model), "config": config.model_dump_json()})
    overrides |= _build_own_section({"cpus": BRIDGE_CPUS})
    settings = path / "verl.json"
    settings.write_text(json.dumps(overrides, indent=2))
    return settings


def _build_own_section(values: Overrides) -> Overrides:
    return {f"{SECTION}.{key}": value for key, value in values.items()}


def _write_address(
    settings: Path, address: StoreAddress, folder: RunFolder, store_url: str | None
) -> None:
    """Add the store: its token stays in a file, since verl prints its config."""
    directory = folder.path if store_url is None else folder.path.parent.parent
    overrides = json.loads(settings.read_text())
    overrides |= _build_own_section(
        {
            "store": address.url,
            "run": address.run,
            "token_folder": str(directory.absolute()),
        }
    )
    settings.write_text(json.dumps(overrides, indent=2))


async def _check_settings(config: RunConfig, settings: Path) -> None:
    """Let verl's environment check the settings, before anything is started.

    Raises:
        ConfigError: what it found, in one line.
    """
    done = await anyio.run_process(
        _build_command(config, settings, "--check"), check=False, stderr=subprocess.STDOUT
    )
    if done.returncode:
        lines = done.stdout.decode(errors="replace").strip().splitlines()
        reason = lines[-1].removeprefix("whet: ") if lines else f"exit code {done.returncode}"
        raise ConfigError(reason)


def _build_command(config: RunConfig, settings: Path, *flags: str) -> list[str]:
    assert isinstance(config.trainer, VerlConfig)
    python = config.trainer.python or sys.executable
    return [python, "-m", "whet.app.verl.entrypoint", str(settings), *flags]


# ------------------------------------------------------------------- processes


async def _run_verl(config: RunConfig, settings: Path, name: str, *, is_alone: bool) -> None:
    """Run verl to its end; a run without a store is resumed by its name."""
    environment = {**os.environ, SUPERVISED: "1", "PYTHONUNBUFFERED": "1"}
    async with await anyio.open_process(
        _build_command(config, settings),
        stdin=subprocess.PIPE,
        stdout=None,
        stderr=None,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                with anyio.move_on_after(STOP_TIMEOUT_S, shield=True):
                    await process.wait()
    if code == EXIT_CONFIG_ERROR:
        raise ConfigError("verl rejected its settings; the line above has the reason")
    if code:
        found = f"verl ended with exit code {code}; its lines are above, and "
        rest = "continues from its last checkpoint"
        raise RunFailed.phrase(
            python=f"{found}{'resume=True' if is_alone else 'the same call'} {rest}",
            command=f"{found}{f'--resume {name}' if is_alone else 'the same command'} {rest}",
        )


@asynccontextmanager
async def _serve_store(store: SQLStore, folder: RunFolder) -> AsyncGenerator[StoreAddress]:
    key = token.make_token(folder.path).value
    server = StoreServer(store, token=key, host=folder.read_config().gateway.host)
    try:
        yield StoreAddress(server.url, DEFAULT_RUN, key)
    finally:
        await anyio.to_thread.run_sync(server.close)
