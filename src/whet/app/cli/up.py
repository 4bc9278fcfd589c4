"""`whet up`: start all processes of a run on this machine, and restart those that die."""

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

from whet.app.cli.config_flags import TRAINING_KEYS, add_config_flags, read_config_values
from whet.app.cli.flags import (
    CommandParser,
    add_agent_flags,
    add_tasks_flags,
    format_agent_arguments,
)
from whet.app.composition.distributed import print_line
from whet.config import RunConfig, merge, resolve
from whet.errors import ConfigError
from whet.io.process import SUPERVISED, RestartBackoff, find_free_port, handle_stop_signals
from whet.io.threads import run_async
from whet.store import DEFAULT_RUN
from whet.store.http.token import make_token

EXIT_CONFIG_ERROR = 2
"""Exit code of an error that the user must fix. One restart: the store may have been away."""
STOP_TIMEOUT_S = 30.0
"""Seconds between SIGTERM and SIGKILL."""
NAME_WIDTH = 9


def add_arguments(parser: CommandParser) -> None:
    """Add the flags of `whet up`."""
    parser.usage = "whet up AGENT --tasks FILE [options] [-- COMMAND or server flags]"
    add_agent_flags(parser)
    add_tasks_flags(parser, held_out=True)
    group = parser.group("processes")
    group.add_argument(
        "--runners", type=int, default=1, metavar="N", help="runner processes (default 1)"
    )
    group.add_argument(
        "--db",
        metavar="DB",
        help="SQLite file or postgresql://... (default DIR/store.db)",
    )
    add_config_flags(parser, TRAINING_KEYS, defaults={"name": DEFAULT_RUN})
    parser.set_defaults(run=run_up)


def run_up(args: argparse.Namespace) -> int:
    """Run the processes; the exit code is that of the one that trains."""
    values = read_config_values(args)
    config = resolve(values)
    if args.runners < 1:
        raise ConfigError(f"invalid --runners {args.runners}: expected at least 1")
    return run_async(_supervise, _plan_processes(args, config, values))


def _plan_processes(
    args: argparse.Namespace, config: RunConfig, values: dict[str, JsonValue]
) -> dict[str, list[str]]:
    """The command line of each process. The last one is the one that trains."""
    agent = format_agent_arguments(args)
    if args.tasks is None and args.env is None:
        raise ConfigError("no tasks: name a file with --tasks")
    make_token(config.dir)
    port, run, host = find_free_port(), config.name or DEFAULT_RUN, socket.gethostname()
    store = ["--store", f"http://127.0.0.1:{port}"]
    run_flags = [*store, "--run", run, "--dir", str(config.dir)]
    database = ["--db", args.db] if args.db else []
    serving = {name: values[name] for name in ("engine", "gateway") if name in values}
    serving = merge(serving, {"gateway": {"port": config.gateway.port or find_free_port()}})
    concurrency = max(1, config.runner.concurrency // args.runners)
    execution = [f"--concurrency={concurrency}", f"--lease={config.runner.lease_s}"]
    execution += [f"--processes={config.runner.processes or 0}"]
    execution += [f"--tracer={config.runner.tracer}"] if config.runner.tracer else []
    tasks = agent if args.tasks is None else ["--tasks", args.tasks]
    held_out = ["--held-out", args.held_out] if args.held_out else []
    engine = config.engine
    after = ["--", *engine.flags] if engine.kind == "vllm" and engine.flags else []
    return {
        "store": ["store", f"--port={port}", "--dir", str(config.dir), *database],
        "serve": ["serve", *run_flags, *_as_flags(serving), *after],
        **{
            f"runner-{n}": ["runner", *run_flags, *execution, f"--worker={host}-{run}-{n}", *agent]
            for n in range(1, args.runners + 1)
        },
        "train": ["train", *tasks, *held_out, *store, *_as_flags(values), *after],
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


async def _supervise(plan: dict[str, list[str]]) -> int:
    children = [Child(name, arguments) for name, arguments in plan.items()]
    ended = anyio.Event()
    code = 0

    async def keep_alive(child: Child) -> None:
        nonlocal code
        exit_code = await child.keep_alive()
        if not ended.is_set():
            code = exit_code
            ended.set()

    async with handle_stop_signals() as stop, create_task_group() as tasks:
        for child in children:
            tasks.start_soon(keep_alive, child)
        with stop.cancel_on_request():
            await ended.wait()
        if stop.requested.is_set():
            print_line("stopping; the same command resumes the run")
            code = 130
        ended.set()
        # The trainer first, then the processes it needs.
        for child in reversed(children):
            await child.stop()
        tasks.cancel_scope.cancel()
    return code


class Child:
    """A process that is restarted when it dies."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self._name = name
        self._arguments = arguments
        self._process: Process | None = None
        self._is_wanted = True

    async def keep_alive(self) -> int:
        """Restart the process until it is done, stopped or given up; returns its exit code."""
        backoff = RestartBackoff()
        while True:
            began = time.monotonic()
            code = await self._run_once()
            if not self._is_wanted or (self._name == "train" and code == 0):
                return code
            pause = backoff.count_death(time.monotonic() - began)
            is_first = backoff.deaths == 1 and self._name != "train"
            if pause is None or (code == EXIT_CONFIG_ERROR and not is_first):
                self._print(f"ended ({_describe_exit(code)}); giving up")
                return code
            self._print(f"died ({_describe_exit(code)}); restarting in {pause:g} s")
            await anyio.sleep(pause)

    async def stop(self) -> None:
        """Terminate the process, and kill it after a timeout."""
        self._is_wanted = False
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        with anyio.move_on_after(STOP_TIMEOUT_S):
            await process.wait()
        if process.returncode is None:
            self._print("did not stop: killed")
            process.kill()
            await process.wait()

    async def _run_once(self) -> int:
        command = [sys.executable, "-m", "whet", *self._arguments]
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
            async for chunk in self._process.stdout:
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._print(line.decode(errors="replace"))
            return await self._process.wait()

    def _print(self, text: str) -> None:
        print_line(f"{self._name:<{NAME_WIDTH}}| {text}")


def _describe_exit(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
