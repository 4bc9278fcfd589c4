"""The agent that a command line names: a function, a service, or a command after `--`."""

import argparse
from typing import cast

from whet.app.flags import command_in
from whet.app.loading import load_function, with_extra
from whet.errors import ConfigError, boundary
from whet.runners.agent import Agent, check_agent


def add_agent_flags(parser: argparse.ArgumentParser) -> None:
    """Any of the three."""
    parser.add_argument(
        "agent",
        nargs="?",
        help="module:function, or file.py:function; or a command of any language after --",
    )
    parser.add_argument(
        "--service", default=None, metavar="URL", help="a service instead, or a whet.Service of it"
    )
    parser.add_argument(
        "--reward",
        choices=["output", "exit"],
        default=None,
        help="of a command after --: the last line of its output, or its exit code [output]",
    )


def agent_arguments(args: argparse.Namespace) -> list[str]:
    """What names the same agent to another command, as the last of its arguments.

    Raises:
        ConfigError: there is not exactly one, or `--reward` is of none.
    """
    _check_one(args)
    if after := command_in(args):
        return [*(["--reward", args.reward] if args.reward else []), "--", *after]
    return ["--service", args.service] if args.service else [args.agent]


def has_agent(args: argparse.Namespace) -> bool:
    """Whether the command line names one."""
    return bool(args.agent or args.service or command_in(args))


def load_agent(args: argparse.Namespace) -> Agent:
    """The agent. Raises ConfigError unless there is exactly one, and it can be run."""
    _check_one(args)
    if after := command_in(args):
        return with_extra("whet.runners.command", "command")(after, reward=args.reward or "output")
    if args.service and "://" in args.service:
        return with_extra("whet.runners.service", "Service")(args.service)
    agent = load_function(args.service or args.agent)
    if args.service and isinstance(agent, type):
        with boundary(ConfigError, f"cannot make the service {args.service!r}"):
            agent = agent()
    check_agent(agent)
    return cast(Agent, agent)


def _check_one(args: argparse.Namespace) -> None:
    named = [each for each in (args.agent, args.service, command_in(args)) if each]
    if len(named) != 1:
        raise ConfigError(
            "name one agent: module:function, or --service URL, or a command after --"
            f"; found {len(named)}"
        )
    if args.reward is not None and not command_in(args):
        raise ConfigError("--reward is for a command after --: any other agent gives its own")
