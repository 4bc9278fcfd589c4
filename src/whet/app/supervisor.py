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

from whet.app.places import say
from whet.app.signals import SUPERVISED, run_async, stoppable
from whet.config import RunConfig
from whet.store.sql import DEFAULT_RUN
from whet.store.token import make_token

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
HEALTHY_S = 60.0
"""Who lived so long before it died is started again at once."""
MOST_DEATHS = 6
"""In a row, each after less than that: it will not get better."""
PATIENCE_S = 30.0
"""For a process that was asked to stop."""
NAME_WIDTH = 9


def supervise(args: argparse.Namespace, config: RunConfig, flags: dict[str, JsonValue]) -> int:
    """Run the processes; the exit code is that of the one that trains."""
    return run_async(_supervise, _plan(args, config, flags))


def _plan(
    args: argparse.Namespace, config: RunConfig, flags: dict[str, JsonValue]
) -> dict[str, list[str]]:
    """The command line of each process. The last one is the one that trains."""
    make_token(config.dir)
    port = free_port()
    place = [
        *("--store", f"http://127.0.0.1:{port}"),
        *("--run", config.name or DEFAULT_RUN),
        *("--dir", str(config.dir)),
    ]
    database = ["--db", args.db] if args.db else []
    gateway = [f"--gateway.port={config.gateway.port or free_port()}"]
    serving = {name: flags[name] for name in ("engine", "gateway") if name in flags}
    concurrency = max(1, config.runner.concurrency // args.runners)
    at_once = [f"--concurrency={concurrency}", f"--lease={config.runner.lease_s}"]
    training = [f"--{n}={v}" for n in ("tasks", "held_out", "config") if (v := vars(args)[n])]
    return {
        "store": ["store", f"--port={port}", "--dir", str(config.dir), *database],
        "serve": ["serve", *place, *_as_flags(serving), *gateway],
        **{
            f"runner-{number}": [
                "runner",
                args.agent,
                *place,
                *at_once,
                f"--name={socket.gethostname()}-{config.name or DEFAULT_RUN}-{number}",
            ]
            for number in range(1, args.runners + 1)
        },
        "train": [
            "train",
            *(flag.replace("--held_out", "--held-out") for flag in training),
            *place[:2],
            *_as_flags(flags),
        ],
    }


def _as_flags(values: Mapping[str, JsonValue], prefix: str = "") -> list[str]:
    flags: list[str] = []
    for key, value in values.items():
        name = prefix + key.replace("_", "-")
        if isinstance(value, dict):
            flags += _as_flags(value, f"{name}.")
        else:
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
    train = children[-1]
    async with stoppable() as stop, create_task_group() as tasks:
        for child in children:
            tasks.start_soon(child.live)

        async def stop_all() -> None:
            await stop.asked.wait()
            say("stopping: the same command goes on where this ends")
            train.end.set()

        tasks.start_soon(stop_all)
        await train.end.wait()
        # Whoever trains first, then those it needs.
        for child in reversed(children):
            await child.stop()
        tasks.cancel_scope.cancel()
    return 130 if stop.asked.is_set() else train.code


class Child:
    """A process that is started again when it dies."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.name = name
        self.code = 0
        self.end = anyio.Event()
        """It ended for good."""
        self._arguments = arguments
        self._process: Process | None = None
        self._is_wanted = True

    async def live(self) -> None:
        """Start it until it is done, is not wanted any more, or dies again and again."""
        deaths, pause = 0, FIRST_PAUSE_S
        while self._is_wanted:
            began = time.monotonic()
            self.code = await self._run_once()
            if not self._is_wanted:
                break
            lived = time.monotonic() - began
            deaths, pause = (deaths + 1, pause) if lived < HEALTHY_S else (1, FIRST_PAUSE_S)
            if (self.code in (0, 2) and self.name == "train") or deaths >= MOST_DEATHS:
                break
            self._say(f"died ({_why(self.code)}); starts again in {pause:g} s")
            await anyio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        self.end.set()

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
        say(f"{self.name:<{NAME_WIDTH}}| {text}")


def _why(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
