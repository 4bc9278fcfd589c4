"""`whet runner`: run an agent on queued rollouts; runners join and leave at any time."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import anyio
from anyio import create_task_group

from whet.app.cli.flags import (
    CommandParser,
    add_agent_flags,
    add_store_flags,
    format_agent_arguments,
    has_agent,
    load_agent,
)
from whet.app.composition.distributed import (
    StoreAddress,
    connect_store,
    explain_unread,
    find_endpoints,
    find_store,
    print_line,
    raise_file_limit,
)
from whet.app.composition.ray_runners import (
    DEFAULT_NAME,
    GRACE_S,
    PoolSettings,
    run_pool,
    set_runners,
)
from whet.config import RunnerConfig, resolve
from whet.errors import ConfigError
from whet.io.process import follow_supervisor, handle_stop_signals
from whet.io.threads import run_async
from whet.protocols import Store
from whet.runners.agent import POLICY, Agent, inspect_agent
from whet.runners.attempt import check_runnable
from whet.runners.endpoints import Endpoints, NoEndpoint
from whet.runners.hooks import Hooks, load_hooks
from whet.runners.runner import Runner
from whet.types import Attempt, Failure, FailureKind, GatewayAddress, Outcome

NO_GATEWAY = "none"
ENDED = "ended"
MAX_FAILURES_SHOWN = 20
PROGRESS_INTERVAL_S = 10.0
"""Seconds between progress lines."""


def add_arguments(parser: CommandParser) -> None:
    """Add the flags of `whet runner`."""
    parser.usage = "whet runner AGENT [options] [-- COMMAND]"
    add_agent_flags(parser)
    add_store_flags(parser)
    parser.group("store").add_argument(
        "--gateway",
        metavar="URL",
        help="gateway URL, or 'none' (default: found in the store)",
    )
    group = parser.group("execution")
    group.add_argument(
        "--concurrency",
        type=int,
        default=64,
        metavar="N",
        help="attempts to run at once (default 64)",
    )
    group.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="agent processes, 0: in this one (default: from cores)",
    )
    group.add_argument(
        "--lease",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds without a heartbeat before a runner counts as dead (default 30)",
    )
    group.add_argument(
        "--grace",
        type=float,
        default=GRACE_S,
        metavar="S",
        help=f"seconds to finish attempts after SIGTERM (default {GRACE_S:g})",
    )
    group.add_argument(
        "--worker",
        metavar="NAME",
        help="worker name; a restart under it releases its leases",
    )
    group.add_argument(
        "--hooks",
        action="append",
        default=[],
        metavar="CLASS",
        help="module:Class of whet.Hooks around attempts; repeatable",
    )
    group.add_argument(
        "--tracer",
        metavar="NAME",
        help="record the spans of an SDK: otel or openai-agents",
    )
    _add_ray_flags(parser)
    parser.add_examples(
        "whet runner agent.py:answer --store http://127.0.0.1:4747 --concurrency 16",
    )
    parser.set_defaults(run=run_runner)


def _add_ray_flags(parser: CommandParser) -> None:
    group = parser.group("Ray")
    group.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run runners on a Ray cluster: its address, auto, or local",
    )
    group.add_argument(
        "--num", type=int, metavar="N", help="runners on the cluster (default 1 with --ray)"
    )
    group.add_argument(
        "--cpus",
        type=float,
        metavar="F",
        help="CPUs that each runner reserves there (default 1)",
    )
    group.add_argument(
        "--scale",
        type=int,
        metavar="N",
        help="set the number of runners of a running --ray, and exit",
    )


def run_runner(args: argparse.Namespace) -> int:
    """Run rollouts until SIGTERM or Ctrl-C."""
    follow_supervisor()
    _check_ray_flags(args)
    if args.scale is not None:
        run_async(_scale, args)
        return 0
    flags = {"concurrency": args.concurrency, "processes": args.processes, "lease_s": args.lease}
    config = resolve({"runner": {**flags, "tracer": args.tracer}}).runner
    agent = load_agent(args)
    check_runnable(agent, config)
    if args.gateway == NO_GATEWAY and "llm" in inspect_agent(agent).parameters:
        raise ConfigError(
            f"--gateway {NO_GATEWAY} is for agents that call their models directly, but this one "
            "takes `llm`: use the parameter `llms`, which has the endpoints among the run's "
            "resources"
        )
    hooks = load_hooks(args.hooks)
    if args.ray is not None:
        run_async(_run_on_ray, args)
        return 0
    raise_file_limit()
    run_async(_run, agent, config, hooks, args)
    # A sync agent that did not finish may still be in its thread, which would keep the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def _run(
    agent: Agent, config: RunnerConfig, hooks: Sequence[Hooks], args: argparse.Namespace
) -> None:
    counts = Counter[str]()

    def on_outcome(attempt: Attempt, outcome: Outcome) -> None:
        failure = outcome.failure
        counts[_name_outcome(failure)] += 1
        failed = counts.total() - counts[ENDED]
        if failure is not None and failed <= MAX_FAILURES_SHOWN:
            print_line(f"{attempt.id} failed, {failure.kind.value}: {failure.message}")
            if failed == MAX_FAILURES_SHOWN:
                print_line("further failures are only counted; the store has them all")

    async with AsyncExitStack() as stack:
        stop = await stack.enter_async_context(handle_stop_signals())
        with stop.cancel_on_request():
            address = await find_store(args.store, args.run_name, Path(args.dir))
            store = await stack.enter_async_context(connect_store(address))
        if stop.requested.is_set():
            return
        runner = Runner(
            agent,
            config,
            store=store,
            endpoints=_choose_endpoints(args.gateway, store, address),
            name=args.worker,
            hooks=hooks,
            on_outcome=on_outcome,
            on_warning=print_line,
            explain_unread=partial(explain_unread, store),
        )
        print_line(f"runner {runner.name} joined run {address.run} of {address.shown_url}")

        async def leave_on_stop() -> None:
            await stop.requested.wait()
            print_line(
                f"runner {runner.name} stops: {runner.running} attempts have {args.grace:g} s to "
                "finish"
            )
            runner.drain(args.grace)

        async def show_progress() -> None:
            shown = 0
            while True:
                await anyio.sleep(PROGRESS_INTERVAL_S)
                if counts.total() > shown:
                    shown = counts.total()
                    print_line(f"{_describe(counts)}, {runner.running} running")

        async with create_task_group() as tasks:
            tasks.start_soon(leave_on_stop)
            tasks.start_soon(show_progress)
            await runner.run()
            tasks.cancel_scope.cancel()
        print_line(f"runner {runner.name} left: {_describe(counts)}")


# ------------------------------------------------------------------- Ray


def _check_ray_flags(args: argparse.Namespace) -> None:
    if args.ray is None and (args.num is not None or args.cpus is not None):
        flag = "--num" if args.num is not None else "--cpus"
        raise ConfigError(f"{flag} is for runners on a Ray cluster: add --ray auto")
    if args.scale is not None and (args.ray is not None or has_agent(args)):
        raise ConfigError(
            "--scale changes a running `whet runner --ray`: leave out --ray and AGENT"
        )
    for flag in ("num", "scale"):
        if (number := getattr(args, flag)) is not None and number < 0:
            raise ConfigError(f"invalid --{flag} {number}: expected 0 or more")
    if args.cpus is not None and args.cpus <= 0:
        raise ConfigError(f"invalid --cpus {args.cpus:g}: expected more than 0")


async def _scale(args: argparse.Namespace) -> None:
    address = await find_store(args.store, args.run_name, Path(args.dir))
    name = args.worker or DEFAULT_NAME
    async with connect_store(address) as store:
        await set_runners(store, name, args.scale)
    print_line(f"run {address.run}: {args.scale} runners {name}-N requested on Ray")


async def _run_on_ray(args: argparse.Namespace) -> None:
    arguments = [f"--concurrency={args.concurrency}", f"--lease={args.lease}"]
    arguments += [f"--grace={args.grace}", *(f"--hooks={hook}" for hook in args.hooks)]
    arguments += [f"--processes={args.processes}"] if args.processes is not None else []
    arguments += [f"--tracer={args.tracer}"] if args.tracer else []
    settings = PoolSettings(
        ray=args.ray,
        num=1 if args.num is None else args.num,
        cpus=args.cpus or 1.0,
        name=args.worker or DEFAULT_NAME,
        grace_s=args.grace,
    )
    async with handle_stop_signals() as stop:
        with stop.cancel_on_request():
            address = await find_store(args.store, args.run_name, Path(args.dir))
        if not stop.requested.is_set():
            await run_pool(
                settings,
                address,
                [*arguments, *format_agent_arguments(args)],
                gateway=args.gateway,
                stop=stop.requested,
                progress=print_line,
            )


def _choose_endpoints(url: str | None, store: Store, address: StoreAddress) -> Endpoints:
    if url == NO_GATEWAY:
        return NoEndpoint()
    fixed = [GatewayAddress(url.removesuffix("/v1"), POLICY)] if url else []
    return find_endpoints(store, address.secret, fixed, print_line)


def _name_outcome(failure: Failure | None) -> str:
    if failure is None:
        return ENDED
    if failure.kind is FailureKind.WORKER_LEFT:
        return "returned to the queue"
    return f"failed ({failure.kind.value})"


def _describe(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "no attempts were run"
