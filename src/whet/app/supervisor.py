"""`whet up`: all processes of a run on this machine, kept alive until the training is done."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import anyio
from anyio import create_task_group
from anyio.abc import Process
from pydantic import JsonValue

from whet.app.agents import agent_arguments
from whet.app.places import say
from whet.app.signals import SUPERVISED, run_async, stoppable
from whet.config import RunConfig, merge
from whet.store.sql import DEFAULT_RUN
from whet.store.token import make_token

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
HEALTHY_S = 60.0
"""Who lived so long before it died is started again at once."""
MOST_DEATHS = 6
"""In a row, each after less than that: it will not get better."""
MENDABLE = 2
"""The exit code of what the user has to mend. Tried once more: a store may have been away."""
PATIENCE_S = 30.0
"""For a process that was asked to stop."""
NAME_WIDTH = 9


def supervise(args: argparse.Namespace, config: RunConfig, values: dict[str, JsonValue]) -> int:
    """Run the processes; the exit code is that of the one that trains."""
    return run_async(_supervise, _plan(args, config, values))


def _plan(
    args: argparse.Namespace, config: RunConfig, values: dict[str, JsonValue]
) -> dict[str, list[str]]:
    """The command line of each process. The last one is the one that trains."""
    agent = agent_arguments(args)
    make_token(config.dir)
    port, run, host = free_port(), config.name or DEFAULT_RUN, socket.gethostname()
    store = ["--store", f"http://127.0.0.1:{port}"]
    place = [*store, "--run", run, "--dir", str(config.dir)]
    database = ["--db", args.db] if args.db else []
    serving = {name: values[name] for name in ("engine", "gateway") if name in values}
    serving = merge(serving, {"gateway": {"port": config.gateway.port or free_port()}})
    concurrency = max(1, config.runner.concurrency // args.runners)
    at_once = [f"--concurrency={concurrency}", f"--lease={config.runner.lease_s}"]
    at_once += [f"--processes={config.runner.processes}"]
    at_once += [f"--tracer={config.runner.tracer}"] if config.runner.tracer else []
    held_out = ["--held-out", args.held_out] if args.held_out else []
    after = ["--", *config.engine.flags] if config.engine.flags else []
    return {
        "store": ["store", f"--port={port}", "--dir", str(config.dir), *database],
        "serve": ["serve", *place, *_as_flags(serving), *after],
        **{
            f"runner-{n}": ["runner", *place, *at_once, f"--name={host}-{run}-{n}", *agent]
            for n in range(1, args.runners + 1)
        },
        "train": ["train", "--tasks", args.tasks, *held_out, *store, *_as_flags(values), *after],
    }


def _as_flags(values: Mapping[str, JsonValue], prefix: str = "") -> list[str]:
    flags: list[str] = []
    for key, value in values.items():
        name = prefix + key.replace("_", "-")
        if isinstance(value, dict):
            flags += _as_flags(value, f"{name}.")
        elif name != "engine.flags":  # which may have commas of their own: they go after `--`
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            flags.append(f"--{name}={text}")
    return flags


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def _supervise(plan: dict[str, list[str]]) -> int:
    children = [Child(name, arguments) for name, arguments in plan.items()]
    over = anyio.Event()
    code = 0

    async def live(child: Child) -> None:
        nonlocal code
        ended = await child.live()
        if not over.is_set():
            code = ended
            over.set()

    async with stoppable() as stop, create_task_group() as tasks:
        for child in children:
            tasks.start_soon(live, child)
        with stop.cancels():
            await over.wait()
        if stop.asked.is_set():
            say("stopping: the same command goes on where this ends")
            code = 130
        over.set()
        # Whoever trains first, then those it needs.
        for child in reversed(children):
            await child.stop()
        tasks.cancel_scope.cancel()
    return code


class Child:
    """A process that is started again when it dies."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self._name = name
        self._arguments = arguments
        self._process: Process | None = None
        self._is_wanted = True

    async def live(self) -> int:
        """Start it until it is done, is not wanted any more, or will not get better."""
        deaths, pause = 0, FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            code = await self._run_once()
            if not self._is_wanted or (self._name == "train" and code == 0):
                return code
            if time.monotonic() - began > HEALTHY_S:
                deaths, pause = 0, FIRST_PAUSE_S
            deaths += 1
            is_hopeless = code == MENDABLE and (deaths > 1 or self._name == "train")
            if is_hopeless or deaths >= MOST_DEATHS:
                self._say(f"ended ({_why(code)}), and would again")
                return code
            self._say(f"died ({_why(code)}); starts again in {pause:g} s")
            await anyio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def stop(self) -> None:
        """Ask it to end, and make it."""
        self._is_wanted = False
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        with anyio.move_on_after(PATIENCE_S):
            await process.wait()
        if process.returncode is None:
            self._say("does not stop: killed")
            process.kill()
            await process.wait()

    async def _run_once(self) -> int:
        command = [sys.executable, "-m", "whet.app.cli", *self._arguments]
        environment = {**os.environ, SUPERVISED: "1", "PYTHONUNBUFFERED": "1"}
        # A session of its own: Ctrl-C in the terminal reaches the supervisor alone.
        async with await anyio.open_process(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        ) as self._process:
            assert self._process.stdout is not None
            rest = b""
            async for piece in self._process.stdout:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    self._say(line.decode(errors="replace"))
            return await self._process.wait()

    def _say(self, text: str) -> None:
        say(f"{self._name:<{NAME_WIDTH}}| {text}")


def _why(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
