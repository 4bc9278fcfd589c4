"""`whet runner`: runs the agent on what the run has queued; joins and leaves at any time."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

import anyio
from anyio import create_task_group

from whet.app.places import Place, allow_many_files, joined, place_of, say
from whet.app.signals import run_async, stoppable
from whet.config import RunnerConfig
from whet.errors import ConfigError
from whet.gateway import keys
from whet.protocols import Store
from whet.runners.agent import Agent, read_agent
from whet.runners.execution import check_runnable
from whet.runners.gateways import Gateways, NoGateway, RemoteGateways
from whet.runners.given import POLICY
from whet.runners.hooks import Hooks, load_hooks
from whet.runners.local import LocalRunner
from whet.types import Attempt, GatewayAddress, Outcome

NO_GATEWAY = "none"
FAILURES_SAID = 20
TELL_S = 10.0
"""How often it is said how far it came, if it came further."""


def runner_command(agent: Agent, config: RunnerConfig, args: argparse.Namespace) -> int:
    """Run rollouts until told to stop."""
    check_runnable(agent, config)
    if args.gateway == NO_GATEWAY and "llm" in read_agent(agent).names:
        raise ConfigError(
            f"--gateway {NO_GATEWAY} is for agents that ask their models themselves, and this one "
            "takes llm: let it take llms, which has the rollout's resources that are endpoints"
        )
    hooks = load_hooks(args.hooks)
    allow_many_files()
    run_async(_run, agent, config, hooks, args)
    # A sync agent that was left alone may still be in its thread, which would keep the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def _run(
    agent: Agent, config: RunnerConfig, hooks: Sequence[Hooks], args: argparse.Namespace
) -> None:
    counts = Counter[str]()

    def on_outcome(attempt: Attempt, outcome: Outcome) -> None:
        failure = outcome.failure
        counts["ended" if failure is None else failure.kind.value] += 1
        failed = counts.total() - counts["ended"]
        if failure is not None and failed <= FAILURES_SAID:
            say(f"{attempt.id} failed, {failure.kind.value}: {failure.message}")
            if failed == FAILURES_SAID:
                say("further failures are only counted; the store has them all")

    async with AsyncExitStack() as stack:
        stop = await stack.enter_async_context(stoppable())
        with stop.cancels():
            place = await place_of(args)
            store = await stack.enter_async_context(joined(place))
        if stop.asked.is_set():
            return
        runner = LocalRunner(
            agent,
            config,
            store=store,
            gateways=_gateways(args.gateway, store, place),
            name=args.name,
            hooks=hooks,
            on_outcome=on_outcome,
            on_warning=say,
        )
        say(f"runner {runner.name} joined run {place.run} of {place.address}")

        async def leave_when_asked() -> None:
            await stop.asked.wait()
            say(f"runner {runner.name} leaves: {runner.running} attempts may end, {args.grace:g} s")
            runner.leave(args.grace)

        async def tell() -> None:
            told = 0
            while True:
                await anyio.sleep(TELL_S)
                if counts.total() > told:
                    told = counts.total()
                    say(f"{_counted(counts)}, {runner.running} running")

        async with create_task_group() as tasks:
            tasks.start_soon(leave_when_asked)
            tasks.start_soon(tell)
            await runner.run()
            tasks.cancel_scope.cancel()
        say(f"runner {runner.name} left: {_counted(counts)}")


def _gateways(given: str | None, store: Store, place: Place) -> Gateways:
    if given == NO_GATEWAY:
        return NoGateway()
    address = GatewayAddress(given.removesuffix("/v1"), POLICY) if given else None
    key = partial(keys.mint, secret=place.secret)
    return RemoteGateways(store, key, given=address, say=say)


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "nothing was run"
